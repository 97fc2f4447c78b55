#!/usr/bin/env bash
# Puts librocksdb.so and liblmdb.so, with what they need, into the folder given: links to the system's where it has them, otherwise
# out of Debian's or Ubuntu's packages, which are unpacked there and installed nowhere. Needs no root. What cannot be had is said,
# and is no error: the benches then say which rival is missing.
set -uo pipefail
folder=$(realpath -m "$1")
mkdir -p "$folder/lib"

# The system's library, by its link for compilers or its versioned name.
system_library() {
	{ ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | sed -n "s|^[[:space:]]*$1\.so[^ ]* .*=> ||p" | head -n 1
}

apt() {
	timeout 90 "$@" -o Dir::State="$folder/apt/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$folder/apt/cache" \
		-o APT::Sandbox::User=root -o Acquire::Retries=1 -o Acquire::http::Timeout=20
}

# The library packages that a package names, but the C and C++ runtimes, which every system that builds Rust has.
libraries_of() {
	apt apt-cache depends --no-recommends --no-suggests "$1" | sed -n 's/^ *Depends: \(lib[^ :<>]*\)$/\1/p' |
		grep -Ev '^(libc6|libgcc-s1|libstdc\+\+6)$|-dev$'
}

# The library that a package for compilers is for, and what it depends on.
fetch() {
	mkdir -p "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial"
	[ -n "${updated:-}" ] || apt apt-get -qq update || return 1
	updated=yes
	local library packages
	library=$(libraries_of "$1")
	[ -n "$library" ] || return 1
	packages="$library $(libraries_of "$library")"
	# shellcheck disable=SC2086
	(cd "$folder/apt" && apt apt-get -qq download $packages) || return 1
	local package
	for package in "$folder"/apt/*.deb; do
		dpkg -x "$package" "$folder/apt/root" && rm "$package"
	done
	find "$folder/apt/root" -name 'lib*.so*' -exec cp -P -n {} "$folder/lib/" \;
	rm -rf "$folder/apt/root"
}

# library, the package for compilers that names the one with the library
provide() {
	local library=$1 package=$2 found
	[ -e "$folder/lib/$library.so" ] && return
	found=$(system_library "$library")
	if [ -n "$found" ]; then
		ln -sf "$found" "$folder/lib/$library.so"
		return
	fi
	if ! command -v apt-get dpkg >/dev/null; then
		echo "$library: not on this system, which has no apt-get to fetch it with: install $package or its like"
		return
	fi
	if ! fetch "$package"; then
		echo "$library: not on this system, and its package could not be fetched: install $package"
		return
	fi
	found=$(cd "$folder/lib" && ls "$library".so.* 2>/dev/null | head -n 1)
	[ -e "$folder/lib/$library.so" ] || { [ -n "$found" ] && ln -sf "$found" "$folder/lib/$library.so"; }
}

provide librocksdb librocksdb-dev
provide liblmdb liblmdb-dev
rm -rf "$folder/apt"

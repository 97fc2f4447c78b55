#!/usr/bin/env bash
# Puts librocksdb.so and liblmdb.so, with what they need, into the given folder. Where the system has them these are links.
# Otherwise they come out of Debian's or Ubuntu's packages, which are unpacked there and not installed. This needs no root. A
# library that cannot be had is no error: it is reported, and the benches then say which rival is missing.
set -uo pipefail
folder=$(realpath -m "$1")
mkdir -p "$folder/lib"

# Prints the path of the system's library, found by its name with or without a version.
system_library() {
	{ ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | sed -n "s|^[[:space:]]*$1\.so[^ ]* .*=> ||p" | head -n 1
}

apt() {
	timeout 90 "$@" -o Dir::State="$folder/apt/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$folder/apt/cache" \
		-o APT::Sandbox::User=root -o Acquire::Retries=1 -o Acquire::http::Timeout=20
}

# Prints the library packages on which a package depends. The C and C++ runtimes are left out, because every system that builds Rust
# has them.
libraries_of() {
	apt apt-cache depends --no-recommends --no-suggests "$1" | sed -n 's/^ *Depends: \(lib[^ :<>]*\)$/\1/p' |
		grep -Ev '^(libc6|libgcc-s1|libstdc\+\+6)$|-dev$'
}

# Fetches the library of a development package, and what that library depends on.
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

# Arguments: the library, and the development package that depends on the package with the library.
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

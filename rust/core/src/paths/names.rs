//! Names of files made from users' names.

use std::fmt::Write as _;

/// Longest encoded name, in bytes. It leaves space for a suffix within the 255 bytes of file systems.
const MAX_NAME_BYTES: usize = 100;

/// Encodes a user's name (of a module, of a table) as a file name: letters, digits, `_`, `-` and `.` are kept, and
/// other bytes become `%XX`, so that distinct names stay distinct. No result is empty, starts with a dot or is longer
/// than 100 bytes (long ones end in a hash).
pub fn encode_name(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for (position, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-' || (byte == b'.' && position > 0) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}"); // a String takes everything
        }
    }
    if encoded.is_empty() {
        return "%".into();
    }
    if encoded.len() > MAX_NAME_BYTES {
        let hash = format!("%~{:016x}", xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
        encoded.truncate(MAX_NAME_BYTES - hash.len());
        encoded.push_str(&hash);
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_names_are_distinct_and_fit_a_file_name() {
        let names = [
            "",
            ".",
            "..",
            "a",
            "A",
            "a/b",
            "a%2Fb",
            "a.b",
            "a b",
            "ü",
            "x+y",
            &"n".repeat(300),
            &"n".repeat(301),
            "~",
            "%",
        ];
        let encoded: std::collections::BTreeSet<String> = names.iter().map(|name| encode_name(name)).collect();
        assert_eq!(encoded.len(), names.len());
        for name in encoded {
            assert!(!name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.starts_with('.'), "{name}");
            assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.%~".contains(&b)), "{name}");
        }
        assert_eq!(encode_name("t_cat-1.w"), "t_cat-1.w");
    }
}

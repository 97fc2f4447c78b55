//! Words in a path that indicate a location for secrets.

use std::path::Component;

/// Words that are not allowed in the path of a checkpoint.
const SENSITIVE_WORDS: [&str; 6] = ["key", "password", "passwd", "secret", "credential", "privatekey"];
/// Words that are sensitive together, with any separator.
const SENSITIVE_PAIRS: [(&str, &str); 4] = [("id", "rsa"), ("id", "dsa"), ("id", "ecdsa"), ("id", "ed25519")];
/// Complete names of directories.
const SENSITIVE_NAMES: [&str; 1] = [".ssh"];
/// Words that contain a sensitive one if they are written with an inner capital, as in `MonKey`.
const HARMLESS_WORDS: [&str; 9] =
    ["monkey", "donkey", "turkey", "hockey", "jockey", "keyboard", "keyword", "keypoint", "keyframe"];

/// Returns the sensitive word in a component of a path: in singular or plural, between characters that are neither
/// letters nor digits, or delimited by a capital, as in `apiKey`. Case is ignored.
pub(super) fn sensitive_word(component: Component<'_>) -> Option<String> {
    let Component::Normal(name) = component else { return None };
    let name = name.to_string_lossy();
    if SENSITIVE_NAMES.iter().any(|sensitive| name.eq_ignore_ascii_case(sensitive)) {
        return Some(name.into_owned());
    }
    let mut words: Vec<String> = Vec::new();
    for run in name.split(|c: char| !c.is_alphanumeric()).filter(|run| !run.is_empty()) {
        let whole = run.to_lowercase();
        if is_one_of(&whole, &SENSITIVE_WORDS) {
            return Some(whole);
        }
        if is_one_of(&whole, &HARMLESS_WORDS) {
            words.push(whole);
        } else {
            words.extend(humps(run));
        }
    }
    if let Some(word) = words.iter().find(|word| is_one_of(word, &SENSITIVE_WORDS)) {
        return Some(word.clone());
    }
    let pairs = words.windows(2).find(|pair| SENSITIVE_PAIRS.contains(&(pair[0].as_str(), pair[1].as_str())))?;
    Some(pairs.join("_"))
}

/// True if `word` is one of `words`, or the plural of one.
fn is_one_of(word: &str, words: &[&str]) -> bool {
    words.iter().any(|one| word == *one || word.strip_suffix('s') == Some(one))
}

/// The words of a run of letters and digits, in lower case. A capital starts a word after a lower-case letter, and
/// before a lower-case letter.
fn humps(run: &str) -> Vec<String> {
    let letters: Vec<char> = run.chars().collect();
    let mut words = vec![String::new()];
    for (position, letter) in letters.iter().enumerate() {
        let after_small = position > 0 && !letters[position - 1].is_uppercase();
        let before_small = letters.get(position + 1).is_some_and(|next| next.is_lowercase());
        if letter.is_uppercase() && position > 0 && (after_small || before_small) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut() {
            word.extend(letter.to_lowercase());
        }
    }
    words
}

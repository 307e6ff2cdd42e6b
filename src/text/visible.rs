//! Makes untrusted text safe to show in an error or a log line.
//!
//! A name may contain characters that are invisible, or that change the display order of the text around them. An error
//! with such a name would be misleading, so these characters are escaped.

use std::borrow::Cow;

/// Whether a character is an invisible format character (Unicode's Cf), or a line or paragraph separator. This includes
/// bidirectional controls and zero-width spaces.
pub fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{890}'..='\u{891}'
            | '\u{8e2}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{110bd}'
            | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0001}'
            | '\u{e0020}'..='\u{e007f}'
    )
}

/// `text` with its invisible and control characters escaped, except line ends and tabs.
pub fn visible(text: &str) -> Cow<'_, str> {
    let hides = |c: char| is_unseen(c) || (c.is_control() && !matches!(c, '\n' | '\t'));
    if !text.contains(hides) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if hides(c) { shown.extend(c.escape_unicode()) } else { shown.push(c) }
    }
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_escaped_and_others_are_not() {
        assert_eq!(visible("a\u{202e}b\u{200b}\u{2028}\u{1b}[0m"), r"a\u{202e}b\u{200b}\u{2028}\u{1b}[0m");
        for seen in ["", "Grüße 🦄", "e\u{301}", "naïve\tname\n", "한국어", "\\u{202e}", "\u{fffd}"] {
            assert!(matches!(visible(seen), Cow::Borrowed(same) if same == seen), "{seen:?}");
        }
    }
}

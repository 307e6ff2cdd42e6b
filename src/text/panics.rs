//! Panic messages for the log. For a wrong string slice, the standard library quotes the string. It may be a prompt,
//! and prompts must not be logged, so the quote is removed.

use std::any::Any;

/// Longest panic message that a log shows, in characters.
const MAX_SHOWN_CHARS: usize = 300;

/// The message of a panic, if it is text.
pub fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

/// The message of a panic as one line for the log, without quoted text.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic_text(panic).map_or("without a message", without_quotes);
    text.lines().next().unwrap_or_default().chars().take(MAX_SHOWN_CHARS).collect()
}

/// The message up to the quoted string, if it is one of the standard library's messages about slicing a string.
fn without_quotes(message: &str) -> &str {
    let ends =
        [" of `", " slicing `"].iter().filter_map(|quote| Some(message.find(quote)? + quote.len() - 1));
    ends.min().map_or(message, |end| message[..end].trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_that_a_panic_quotes_is_removed() {
        // A cut within a character, one beyond the end, and one whose end is before its start.
        for (from, to) in [(2, 3), (0, 99), (3, 1)] {
            let panic = std::panic::catch_unwind(|| "sécret"[from..to].len()).expect_err("it panics");
            let message = panic_message(&*panic);
            assert!(message.len() > 10 && !message.contains("cret"), "{message}");
        }
        assert_eq!(panic_message(&7), "without a message");
        assert_eq!(panic_message(&"a `b` of c\nd"), "a `b` of c");
        assert!(panic_message(&"x".repeat(5000)).len() < 400);
    }
}

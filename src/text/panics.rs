//! What a panic says. The standard library quotes the text that was cut wrongly, which may be a prompt: a log has none of it.

use std::any::Any;

/// How much of a message a log shows.
const MAX_SHOWN_CHARS: usize = 300;

/// What a panic says, if that is text.
pub fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

/// What a panic says, as a line of the log may have it.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic_text(panic).map_or("without a message", without_quotes);
    text.lines().next().unwrap_or_default().chars().take(MAX_SHOWN_CHARS).collect()
}

/// The message without the string that it quotes, if it is one of those of slicing a string.
fn without_quotes(message: &str) -> &str {
    let ends =
        [" of `", " slicing `"].iter().filter_map(|quote| Some(message.find(quote)? + quote.len() - 1));
    ends.min().map_or(message, |end| message[..end].trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_quotes_of_a_text_is_not_told() {
        // Within a character, beyond the end, and backwards.
        for (from, to) in [(2, 3), (0, 99), (3, 1)] {
            let panic = std::panic::catch_unwind(|| "sécret"[from..to].len()).expect_err("it panics");
            let told = panic_message(&*panic);
            assert!(told.len() > 10 && !told.contains("cret"), "{told}");
        }
        assert_eq!(panic_message(&7), "without a message");
        assert_eq!(panic_message(&"a `b` of c\nd"), "a `b` of c");
        assert!(panic_message(&"x".repeat(5000)).len() < 400);
    }
}

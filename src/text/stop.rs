//! Stop strings in a stream of text.
//!
//! The stop string that is complete first ends the answer. If several are complete at the same byte, the longest one is
//! reported. The result depends only on the text, not on how the text was divided into pushes. No byte of a stop string
//! is returned. Text that may become a stop string is held back: at most `MAX_STOP_BYTES - 1` bytes. Matching is
//! Knuth-Morris-Pratt, O(1) amortised per byte and stop string.

use super::error::TextError;

/// Most stop strings of one answer. Each needs a few KiB of memory and some time for each byte of the answer. Templates of
/// Ollama have up to a dozen.
pub const MAX_STOPS: usize = 32;
/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// Finds the first stop string in text that arrives in pieces.
#[derive(Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Text held back: a proper prefix of some stop string.
    pending: String,
    stopped: bool,
    found: Option<usize>,
}

#[derive(Clone)]
struct Pattern {
    stop: String,
    /// `failure[n]`: length of the longest proper border of the first `n + 1` bytes.
    failure: Vec<usize>,
    /// Length of the longest prefix of `stop` that the text ends with until now.
    matched: usize,
}

/// The outcome of one push.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stopped {
    /// Text that belongs to the answer; may be empty.
    pub text: String,
    /// Index of the stop string that was found and ended the answer.
    pub stop: Option<usize>,
}

impl StopMatcher {
    /// With an empty list, the matcher returns all text unchanged. An empty string, a string over [`MAX_STOP_BYTES`],
    /// or more than [`MAX_STOPS`] strings are errors.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        if stops.len() > MAX_STOPS {
            let problem = format!("{} strings were given, at most {MAX_STOPS} are accepted", stops.len());
            return Err(TextError::Stop(problem));
        }
        let mut patterns = Vec::with_capacity(stops.len());
        for (index, stop) in stops.iter().enumerate() {
            let stop = stop.as_ref();
            if stop.is_empty() {
                return Err(TextError::Stop(format!("string {index} is empty; leave it out")));
            }
            if stop.len() > MAX_STOP_BYTES {
                let problem =
                    format!("string {index} has {} bytes, at most {MAX_STOP_BYTES} are accepted", stop.len());
                return Err(TextError::Stop(problem));
            }
            patterns.push(Pattern::new(stop));
        }
        Ok(Self { patterns, pending: String::new(), stopped: false, found: None })
    }

    /// Takes the next piece of text. After a stop string, every push returns nothing.
    pub fn push(&mut self, text: &str) -> Stopped {
        if self.stopped {
            return Stopped::default();
        }
        if self.patterns.is_empty() {
            return Stopped { text: text.to_owned(), stop: None };
        }
        for (offset, byte) in text.bytes().enumerate() {
            // Every pattern must see the byte, so there is no early exit.
            let mut found: Option<usize> = None;
            for index in 0..self.patterns.len() {
                if self.patterns[index].step(byte)
                    && found.is_none_or(|best| self.patterns[index].len() > self.patterns[best].len())
                {
                    found = Some(index);
                }
            }
            if let Some(index) = found {
                self.stopped = true;
                self.found = Some(index);
                self.pending.push_str(&text[..=offset]);
                self.pending.truncate(self.pending.len() - self.patterns[index].len());
                return Stopped { text: std::mem::take(&mut self.pending), stop: Some(index) };
            }
        }
        // A prefix of a stop string begins at a character, so the cut below is between characters.
        self.pending.push_str(text);
        let waiting = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.pending.split_off(self.pending.len() - waiting);
        Stopped { text: std::mem::replace(&mut self.pending, rest), stop: None }
    }

    /// Index of the stop string that ended the text, if one did.
    pub fn found(&self) -> Option<usize> {
        self.found
    }

    /// What comes next does not continue the text. Returns the text that was held back.
    pub fn pause(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.pending)
    }

    /// Ends the answer. Returns the text that was held back and did not become a stop string.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.pending)
    }
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes();
        let mut failure = vec![0; bytes.len()];
        let mut border = 0;
        for i in 1..bytes.len() {
            while border > 0 && bytes[i] != bytes[border] {
                border = failure[border - 1];
            }
            if bytes[i] == bytes[border] {
                border += 1;
            }
            failure[i] = border;
        }
        Self { stop: stop.to_owned(), failure, matched: 0 }
    }

    fn len(&self) -> usize {
        self.stop.len()
    }

    /// Takes one byte. Returns true if it completes the stop string; the caller must not call this again after that.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.stop.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.failure[self.matched - 1];
        }
        if bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == bytes.len()
    }
}

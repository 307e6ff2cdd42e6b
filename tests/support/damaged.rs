//! Results of reading damaged files. Each must be a success or a short error of one line, within bounded memory.

use std::fmt::Arguments;

use super::{PARSER_BYTES, bounded_allocation};

/// The results until now.
#[derive(Default)]
pub struct DamagedReadings {
    pub read: usize,
    pub refused: usize,
    /// The largest peak of memory of a reading, in bytes.
    pub most_bytes: usize,
}

impl DamagedReadings {
    /// Runs `read` on damaged input of `len` bytes, and counts the result. `what` names the input. Panics if `read`
    /// held too many bytes, or if its error is not a single short line.
    pub fn add<T>(&mut self, len: usize, what: Arguments, read: impl FnOnce() -> Result<T, String>) {
        let (outcome, peak) = bounded_allocation(len, PARSER_BYTES, what, read);
        self.most_bytes = self.most_bytes.max(peak);
        match outcome {
            Ok(_) => self.read += 1,
            Err(error) => {
                self.refused += 1;
                let is_one_line = !error.is_empty() && !error.contains('\n') && error.len() < 2000;
                assert!(is_one_line, "{what}: {error:?}");
            }
        }
    }
}

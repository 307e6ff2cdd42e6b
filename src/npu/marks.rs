//! Marks in an output, which show the host what a dispatch did not write.
//!
//! A command may complete without computing anything, for example after a suspend, or if the instructions are lost. Its
//! buffer then holds the output of an earlier dispatch, which looks valid. So before a dispatch, a mark is written to
//! the start of each block of rows that a core writes. After the dispatch, a number must be there.

use super::contract::Job;
use super::error::{NpuCode, NpuError};

/// A NaN whose payload no arithmetic produces.
const MARK: u32 = 0x7fca_5eed;

/// Calls `write` with a byte offset in the job's output and a word, for each mark.
pub fn put(job: &Job, mut write: impl FnMut(u64, u32)) {
    blocks(job).for_each(|at| write(at, MARK));
}

/// Checks that the dispatch wrote each block of its output. `read` returns the word at a byte offset.
pub fn check(job: &Job, mut read: impl FnMut(u64) -> u32) -> Result<(), NpuError> {
    let unwritten = blocks(job).filter(|at| read(*at) == MARK).count();
    if unwritten == 0 {
        return Ok(());
    }
    let all = blocks(job).count();
    Err(NpuError::new(
        NpuCode::NoOutput,
        format!(
            "the NPU's command completed, and {unwritten} of {all} blocks of its output were not written"
        ),
    ))
}

/// The first bytes of the blocks in the job's output that contain a row of the job. A core writes one block at a time.
fn blocks(job: &Job) -> impl Iterator<Item = u64> {
    let (layout, rows, tile) = (job.layout(), job.rows(), job.tile());
    job.heads().flat_map(move |(group, head)| {
        (0..rows).step_by(tile as usize).map(move |row| layout.output(group, head, row))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npu::contract::{Bucket, RowRange, Shape};
    use crate::npu::tile::{self, Inputs};

    /// A job of two KV heads, whose last block has one row.
    fn job() -> Job {
        let shape = Shape::new(128, 2, None).expect("a shape");
        let bucket = Bucket::new(256, 512, 2).expect("a bucket");
        let range = RowRange { first: 0, len: 65 };
        Job::new(shape, bucket, range, range, None).expect("a job")
    }

    #[test]
    fn a_block_that_was_not_written_is_seen() {
        let job = job();
        let computed = tile::attend(&job, &Inputs::random(&job, 7, 3.0).rounded());
        let mut output = vec![0f32; computed.len()];
        put(&job, |at, word| output[at as usize / 4] = f32::from_bits(word));
        let marks: Vec<usize> = (0..output.len()).filter(|n| output[*n].to_bits() == MARK).collect();
        // Three blocks of 32 rows for each of the four heads, and 256 rows between two heads.
        let expected: Vec<usize> =
            (0..4).flat_map(|head| [0, 32, 64].map(|row| (head * 256 + row) * 128)).collect();
        assert_eq!(marks, expected);
        let check = |output: &[f32]| check(&job, |at| output[at as usize / 4].to_bits());
        let error = check(&output).expect_err("nothing was written");
        assert!(error.code == NpuCode::NoOutput && error.message.contains("12 of 12 blocks"), "{error}");
        assert_eq!(check(&computed), Ok(()));
        for mark in marks {
            let mut without = computed.clone();
            without[mark] = output[mark];
            assert!(check(&without).is_err_and(|error| error.message.contains("1 of 12 blocks")));
        }
        // Any other NaN is a valid output, because the model may have computed it.
        assert_eq!(check(&vec![f32::NAN; output.len()]), Ok(()));
    }
}

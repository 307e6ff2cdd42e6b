//! The instructions of a kernel, a file `.bin`: what the NPU's controller does with the DMAs for one dispatch. They are
//! checked before the driver reads them.
//!
//! They are a transaction of aie-rt, format 0.1, in words of 32 bits, as mlir-aie writes it
//! (`lib/Targets/AIETargetNPU.cpp`): a header of four words, and operations one after the other.
//!
//! | operation | opcode | words |
//! |---|---|---|
//! | write | 0 | opcode, 0, address, 0, value, bytes of the operation |
//! | block write | 1 | opcode, column and row, address, bytes, and the values |
//! | masked write, masked poll | 3, 4 | opcode, 0, address, 0, value, mask, bytes |
//! | wait for a token | 0x80 | opcode, bytes, direction and tile, channel and number of tiles |
//! | patch of an address | 0x81 | opcode, bytes, 3 unused, 0, address, 0, argument, 0, offset, 0 |
//!
//! A patch writes the address of a buffer into a DMA's descriptor. An address has the column from bit 25 on, and the
//! row from bit 20 on. A patch must begin within its buffer. The end of the transfer is not checked, because it depends
//! on the descriptor's strides. So a faulty kernel may access memory outside its buffers, but only memory of the
//! process that uses the NPU, because the IOMMU gives the NPU only the pages of that process.

use super::contract::{Layout, MAX_GROUPS};

/// Maximum size of the instructions. A bucket of 512 rows and four groups needs less than 1 MiB.
pub const MAX_BYTES: u64 = 16 << 20;

const HEADER_WORDS: usize = 4;
/// The generation of the NPU of a Ryzen AI 7040 or 8040, and the rows of its array: shims, memory tiles, 4 rows of
/// cores.
const GENERATION: u32 = 3;
const ROWS: u32 = 6;
const MEM_TILE_ROWS: u32 = 1;

const WRITE: u32 = 0;
const BLOCK_WRITE: u32 = 1;
const MASK_WRITE: u32 = 3;
const MASK_POLL: u32 = 4;
const WAIT: u32 = 0x80;
const PATCH: u32 = 0x81;

/// What is wrong with a stream of instructions: what was found, at which word, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("word {at} of the instructions: {found}; {expected} is expected")]
pub struct TransactionError {
    pub at: usize,
    pub found: String,
    pub expected: String,
}

fn error<T>(at: usize, found: impl Into<String>, expected: impl Into<String>) -> Result<T, TransactionError> {
    Err(TransactionError { at, found: found.into(), expected: expected.into() })
}

/// The words of a file.
pub fn words(bytes: &[u8]) -> Result<Vec<u32>, TransactionError> {
    let (words, rest) = bytes.as_chunks::<4>();
    if bytes.len() > 8 && bytes[..8].iter().all(u8::is_ascii_hexdigit) && bytes[8].is_ascii_whitespace() {
        return error(0, "a number in text", "a word in binary, as newer versions of mlir-aie write it,");
    }
    if !rest.is_empty() {
        return error(words.len(), format!("the last {} bytes of the file", rest.len()), "a word of 4");
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Checks a stream for a partition of `columns` columns and the buffers of this layout. Returns the first error.
pub fn check(words: &[u32], columns: u32, layout: &Layout) -> Result<(), TransactionError> {
    let count = header(words, columns)?;
    let sizes = layout.bytes();
    let mut patched = [false; 5];
    let mut at = HEADER_WORDS;
    for index in 0..count {
        let Some(&opcode) = words.get(at) else {
            return error(at, format!("the end, after {index} operations"), format!("{count} operations"));
        };
        let length = length(words, at, opcode)?;
        let operation = &words[at..at + length];
        match opcode {
            WRITE | MASK_WRITE | MASK_POLL => {
                zero(operation, at, &[1, 3])?;
                address(operation[2], at + 2, columns)?;
            }
            BLOCK_WRITE => {
                address(operation[2], at + 2, columns)?;
                tile(operation[1], operation[2], at + 1)?;
            }
            WAIT => wait(operation[2], operation[3], at, columns)?,
            _ => {
                zero(operation, at, &[2, 3, 4, 5, 7, 9, 11])?;
                address(operation[6], at + 6, columns)?;
                let (argument, offset) = (operation[8] as usize, operation[10]);
                let Some(bytes) = sizes.get(argument) else {
                    let found = format!("a patch with argument {argument}");
                    return error(at + 8, found, "0 to 4, a buffer's number,");
                };
                if u64::from(offset) >= *bytes {
                    let found = format!("a patch with byte {offset} of buffer {argument}");
                    return error(at + 10, found, format!("a byte below {bytes}"));
                }
                patched[argument] = true;
            }
        }
        at += length;
    }
    if at != words.len() {
        let rest = words.len() - at;
        return error(at, format!("{rest} words after the last of {count} operations"), "the end");
    }
    match patched.iter().position(|patched| !patched) {
        Some(buffer) => error(at, format!("the end, and no patch with buffer {buffer}"), "one of each"),
        None => Ok(()),
    }
}

/// Checks the header, and returns the number of operations.
fn header(words: &[u32], columns: u32) -> Result<u32, TransactionError> {
    let [version, array, count, bytes, ..] = *words else {
        return error(words.len(), "the end", format!("a header of {HEADER_WORDS} words"));
    };
    let [major, minor, generation, rows] = version.to_le_bytes();
    if (major, minor) != (0, 1) {
        return error(0, format!("format {major}.{minor}"), "0.1");
    }
    if u32::from(generation) != GENERATION {
        let expected = format!("{GENERATION}, a Ryzen AI 7040 or 8040,");
        return error(0, format!("an NPU of generation {generation}"), expected);
    }
    let [array_columns, mem_tile_rows, ..] = array.to_le_bytes();
    let found = (u32::from(rows), u32::from(array_columns), u32::from(mem_tile_rows), array >> 16);
    if found != (ROWS, columns, MEM_TILE_ROWS, 0) || !(1..=MAX_GROUPS).contains(&columns) {
        return error(
            1,
            format!(
                "an array of {rows} rows and {array_columns} columns, {mem_tile_rows} rows of memory tiles"
            ),
            format!("{ROWS} rows, the partition's {columns} columns, {MEM_TILE_ROWS} row of memory tiles"),
        );
    }
    if u64::from(bytes) != words.len() as u64 * 4 {
        return error(3, format!("a size of {bytes} bytes"), format!("the file's {}", words.len() * 4));
    }
    Ok(count)
}

/// The words of the operation at `at`. Fails if the stream ends within it.
fn length(words: &[u32], at: usize, opcode: u32) -> Result<usize, TransactionError> {
    // The offset of the operation's size, and the size; a block write has at least one value.
    let (place, fixed) = match opcode {
        WRITE => (5, Some(6)),
        BLOCK_WRITE => (3, None),
        MASK_WRITE | MASK_POLL => (6, Some(7)),
        WAIT => (1, Some(4)),
        PATCH => (1, Some(12)),
        _ => return error(at, format!("opcode {opcode:#x}"), "0, 1, 3, 4, 0x80 or 0x81"),
    };
    let rest = words.len() - at;
    let least = fixed.unwrap_or(5);
    if rest < least {
        let found = format!("the last {rest} words, and an operation of opcode {opcode:#x}");
        return error(at, found, format!("{least} words"));
    }
    let bytes = words[at + place];
    let length = (bytes / 4) as usize;
    let fits = bytes.is_multiple_of(4) && length >= least && length <= rest;
    if !fits || fixed.is_some_and(|fixed| length != fixed) {
        let expected = match fixed {
            Some(fixed) => format!("{}", fixed * 4),
            None => format!("{} to {}", least * 4, rest as u64 * 4),
        };
        let found = format!("an operation of opcode {opcode:#x} and {bytes} bytes");
        return error(at + place, found, expected);
    }
    Ok(length)
}

fn zero(operation: &[u32], at: usize, unused: &[usize]) -> Result<(), TransactionError> {
    match unused.iter().find(|index| operation[**index] != 0) {
        Some(index) => error(at + index, format!("{:#x}", operation[*index]), "0"),
        None => Ok(()),
    }
}

fn address(address: u32, at: usize, columns: u32) -> Result<(), TransactionError> {
    let (column, row) = (address >> 25, address >> 20 & 0x1f);
    if column < columns && row < ROWS {
        return Ok(());
    }
    let found = format!("address {address:#x} of column {column}, row {row}");
    error(at, found, format!("a column below {columns} and a row below {ROWS}"))
}

/// Checks the tile of a block write: 0, or the tile of its address.
fn tile(tile: u32, address: u32, at: usize) -> Result<(), TransactionError> {
    let of_address = address >> 25 | (address >> 20 & 0x1f) << 8;
    if tile == 0 || tile == of_address {
        return Ok(());
    }
    error(at, format!("a block write to tile {tile:#x}"), format!("its address's {of_address:#x}"))
}

/// The tiles whose token is awaited.
fn wait(tile: u32, range: u32, at: usize, columns: u32) -> Result<(), TransactionError> {
    let [direction, row, column, rest] = tile.to_le_bytes().map(u32::from);
    let [unused, rows, wide, _channel] = range.to_le_bytes().map(u32::from);
    if direction > 1 || rest != 0 || row + rows > ROWS || column + wide > columns || rows == 0 || wide == 0 {
        let found = format!("a wait for {wide} columns from {column}, {rows} rows from {row}");
        return error(at + 2, found, format!("columns below {columns} and rows below {ROWS}"));
    }
    if unused != 0 { error(at + 3, format!("{unused:#x} in the lowest byte"), "0") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::contract::{Bucket, Shape};
    use super::*;

    fn layout() -> Layout {
        Layout::of(Shape::new(64, 2, None).unwrap(), Bucket::new(256, 512, 2).unwrap())
    }

    /// The operations, after a header for them.
    fn stream(columns: u32, operations: &[Vec<u32>]) -> Vec<u32> {
        let body = operations.concat();
        let header = [
            6 << 24 | 3 << 16 | 1 << 8,
            1 << 8 | columns,
            operations.len() as u32,
            16 + body.len() as u32 * 4,
        ];
        [&header[..], &body].concat()
    }

    fn patch(argument: u32, offset: u32) -> Vec<u32> {
        vec![PATCH, 48, 0, 0, 0, 0, 1 << 25 | 0x1d004, 0, argument, 0, offset, 0]
    }

    /// One operation of each kind, and the patches of all buffers.
    fn operations() -> Vec<Vec<u32>> {
        let address = 1 << 25 | 0x1d000;
        let mut operations = vec![
            vec![WRITE, 0, address, 0, 7, 24],
            vec![BLOCK_WRITE, 1, address, 32, 1, 2, 3, 4],
            vec![MASK_WRITE, 0, address, 0, 7, 0xff, 28],
            vec![MASK_POLL, 0, address, 0, 7, 0xff, 28],
            vec![WAIT, 16, 1 << 16, 1 << 16 | 1 << 8],
        ];
        operations.extend((0..5).map(|argument| patch(argument, 60)));
        operations
    }

    fn checked(words: &[u32]) -> Result<(), TransactionError> {
        check(words, 2, &layout())
    }

    #[track_caller]
    fn refused(operation: usize, word: usize, value: u32, at: usize, message: &str) {
        let mut operations = operations();
        operations[operation][word] = value;
        let found = checked(&stream(2, &operations)).unwrap_err();
        let before: usize = operations[..operation].iter().map(Vec::len).sum();
        assert_eq!(found.at, HEADER_WORDS + before + at, "{found}");
        assert!(found.to_string().contains(message), "{found}");
    }

    #[test]
    fn a_stream_of_every_operation_is_accepted() {
        let words = stream(2, &operations());
        assert_eq!(checked(&words), Ok(()));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(super::words(&bytes), Ok(words));
    }

    #[test]
    fn what_is_no_file_of_words_is_refused() {
        let text = words(b"06030100\n00000104\n").unwrap_err().to_string();
        assert!(text.starts_with("word 0 of the instructions: a number in text; a word in binary"), "{text}");
        let text = words(&[0; 9]).unwrap_err().to_string();
        assert_eq!(text, "word 2 of the instructions: the last 1 bytes of the file; a word of 4 is expected");
    }

    #[test]
    fn headers_are_checked() {
        let with = |word: usize, value: u32| {
            let mut words = stream(2, &operations());
            words[word] = value;
            checked(&words).unwrap_err().to_string()
        };
        for length in 0..HEADER_WORDS {
            assert!(checked(&stream(2, &operations())[..length]).is_err());
        }
        assert!(with(0, 0x0603_0001).starts_with("word 0 of the instructions: format 1.0; 0.1"));
        assert!(with(0, 0x0604_0100).contains("an NPU of generation 4; 3"));
        assert!(with(0, 0x0503_0100).contains("an array of 5 rows"));
        assert!(with(1, 0x104).contains("6 rows and 4 columns"));
        assert!(with(1, 0x202).contains("2 rows of memory tiles"));
        assert!(with(2, 9).contains("12 words after the last of 9 operations; the end"));
        assert!(with(2, 11).contains("the end, after 10 operations; 11 operations"));
        assert!(
            with(3, 0).contains("word 3 of the instructions: a size of 0 bytes; the file's 384"),
            "{}",
            with(3, 0)
        );
        assert!(check(&stream(5, &operations()), 5, &layout()).is_err());
    }

    #[test]
    fn operations_are_checked() {
        refused(0, 0, 2, 0, "opcode 0x2; 0, 1, 3, 4, 0x80 or 0x81");
        refused(0, 0, 0x100, 0, "opcode 0x100");
        refused(0, 2, 2 << 25, 2, "address 0x4000000 of column 2, row 0; a column below 2");
        refused(0, 2, 6 << 20, 2, "of column 0, row 6; a column below 2 and a row below 6");
        refused(0, 3, 1, 3, "0x1; 0");
        refused(0, 5, 28, 5, "opcode 0x0 and 28 bytes; 24");
        refused(1, 1, 2, 1, "a block write to tile 0x2; its address's 0x1");
        refused(1, 3, 16, 3, "opcode 0x1 and 16 bytes; 20 to 344");
        refused(1, 3, 30, 3, "30 bytes");
        refused(1, 3, u32::MAX - 3, 3, "4294967292 bytes");
        refused(2, 2, 7 << 25, 2, "of column 7");
        refused(3, 6, 0, 6, "opcode 0x4 and 0 bytes; 28");
        refused(4, 1, 12, 1, "opcode 0x80 and 12 bytes; 16");
        refused(4, 2, 2 << 16, 2, "a wait for 1 columns from 2, 1 rows from 0; columns below 2");
        refused(4, 2, 2, 2, "a wait");
        refused(4, 3, 2 << 16 | 1 << 8, 2, "a wait for 2 columns from 1");
        refused(4, 3, 1 << 8, 2, "a wait for 0 columns");
        refused(4, 3, 1 << 16 | 1 << 8 | 1, 3, "in the lowest byte");
        refused(5, 8, 5, 8, "a patch with argument 5; 0 to 4");
        refused(6, 8, u32::MAX, 8, "a patch with argument 4294967295");
        refused(5, 6, 4 << 25, 6, "of column 4");
        refused(5, 9, 1, 9, "0x1; 0");
        refused(9, 10, 64, 10, "a patch with byte 64 of buffer 4; a byte below 64");
    }

    #[test]
    fn every_cut_and_every_missing_patch_is_refused() {
        let words = stream(2, &operations());
        for length in 0..words.len() {
            let mut cut = words[..length].to_vec();
            if length > 3 {
                cut[3] = length as u32 * 4;
            }
            assert!(checked(&cut).is_err(), "{length} words");
        }
        for argument in 0..5 {
            let mut operations = operations();
            operations.remove(5 + argument);
            let found = checked(&stream(2, &operations)).unwrap_err().to_string();
            assert!(found.contains(&format!("no patch with buffer {argument}; one of each")), "{found}");
        }
    }
}

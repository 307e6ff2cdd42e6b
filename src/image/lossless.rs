//! Counts the groups of prefix codes of a lossless WebP picture (RFC 9649, 3) before the decoder makes tables for them.
//!
//! Such a picture may have 65,536 groups of five codes. A code of 14 bytes becomes a table of 4 KiB, so a file of 5 MB
//! would take more than a gigabyte, however small the picture is. The number of groups is the largest value in a small
//! picture before the pixels. This reads as far as there. It decodes no pixels: copies of earlier pixels have no larger
//! values than these.

use super::error::ImageError;
use super::format::Format;

/// The most groups of a picture. The usual encoder makes at most 2,600. The largest tables of this many take 0.5 GB.
const MAX_GROUPS: u32 = 4096;

/// The longest prefix code, in bits.
const MAX_CODE_BITS: usize = 15;
/// Symbols of the codes of a group: green with lengths of copies, red, blue, alpha, distances of copies.
const ALPHABETS: [usize; 5] = [256 + LENGTHS, 256, 256, 256, 40];
const LENGTHS: usize = 24;

/// Checks the number of groups of a picture of this width and height, whose `data` follows its header.
///
/// Errors: [`ImageError::Truncated`], [`ImageError::Damaged`].
pub(super) fn check_groups(data: &[u8], (width, height): (u32, u32)) -> Result<(), ImageError> {
    let groups = count_groups(&mut Bits { data, at: 0 }, width, height)?;
    if groups > MAX_GROUPS {
        return Err(damaged(format!("it has {groups} groups of prefix codes, above {MAX_GROUPS}")));
    }
    Ok(())
}

fn damaged(problem: impl Into<String>) -> ImageError {
    ImageError::Damaged { format: Format::WebP, problem: problem.into() }
}

/// The width or height of a picture with one pixel for each block of `1 << bits` pixels.
fn blocks(side: u32, bits: u32) -> u32 {
    side.div_ceil(1 << bits)
}

fn count_groups(bits: &mut Bits, mut width: u32, height: u32) -> Result<u32, ImageError> {
    let mut seen = [false; 4];
    while bits.read(1)? == 1 {
        let transform = bits.read(2)? as usize;
        if std::mem::replace(&mut seen[transform], true) {
            return Err(damaged("it has a transform twice"));
        }
        match transform {
            // The predictors or color factors of blocks.
            0 | 1 => {
                let size = bits.read(3)? + 2;
                largest_value(bits, blocks(width, size), blocks(height, size))?;
            }
            // Green is subtracted, without further data.
            2 => {}
            // A palette. A small one packs several pixels into one.
            _ => {
                let colors = bits.read(8)? + 1;
                largest_value(bits, colors, 1)?;
                width = blocks(width, [3, 2, 1, 0][[2, 4, 16].iter().filter(|most| colors > **most).count()]);
            }
        }
    }
    cache_bits(bits)?;
    if bits.read(1)? == 0 {
        return Ok(1);
    }
    let size = bits.read(3)? + 2;
    Ok(largest_value(bits, blocks(width, size), blocks(height, size))? + 1)
}

/// The bits of an index of the cache of colors; 0 without a cache.
fn cache_bits(bits: &mut Bits) -> Result<u32, ImageError> {
    match bits.read(1)? {
        0 => Ok(0),
        _ => match bits.read(4)? {
            size @ 1..=11 => Ok(size),
            _ => Err(damaged("the size of its color cache is invalid")),
        },
    }
}

/// Passes a picture with one group, and returns the largest `red << 8 | green` in it.
fn largest_value(bits: &mut Bits, width: u32, height: u32) -> Result<u32, ImageError> {
    let cache = match cache_bits(bits)? {
        0 => 0,
        size => 1 << size,
    };
    let mut codes = Vec::with_capacity(ALPHABETS.len());
    for (code, alphabet) in ALPHABETS.into_iter().enumerate() {
        codes.push(Code::read(bits, if code == 0 { alphabet + cache } else { alphabet })?);
    }
    let [green, red, blue, alpha, distance] = &codes[..] else { unreachable!("five codes") };
    let (mut passed, mut largest) = (0, 0);
    while passed < u64::from(width) * u64::from(height) {
        let symbol = green.symbol(bits)?;
        passed += match symbol.checked_sub(256) {
            None => {
                largest = largest.max(red.symbol(bits)? << 8 | symbol);
                blue.symbol(bits)?;
                alpha.symbol(bits)?;
                1
            }
            Some(prefix) if prefix < LENGTHS as u32 => {
                let length = copy_value(bits, prefix)?;
                let prefix = distance.symbol(bits)?;
                copy_value(bits, prefix)?;
                u64::from(length)
            }
            // A color of the cache.
            Some(_) => 1,
        };
    }
    Ok(largest)
}

/// A length or a distance of a copy, from its symbol and the bits that follow.
fn copy_value(bits: &mut Bits, prefix: u32) -> Result<u32, ImageError> {
    if prefix < 4 {
        return Ok(prefix + 1);
    }
    let more = (prefix - 2) >> 1;
    Ok(((2 + (prefix & 1)) << more) + bits.read(more)? + 1)
}

/// A canonical prefix code: the symbols by the length of their codes, and among equal ones by their number.
struct Code {
    /// The number of symbols with codes of each length.
    counts: [u32; MAX_CODE_BITS + 1],
    symbols: Vec<u16>,
}

impl Code {
    fn read(bits: &mut Bits, alphabet: usize) -> Result<Self, ImageError> {
        if bits.read(1)? == 1 {
            let has_two = bits.read(1)? == 1;
            let first_bits = if bits.read(1)? == 1 { 8 } else { 1 };
            let mut symbols = vec![bits.read(first_bits)? as u16];
            let mut counts = [0; MAX_CODE_BITS + 1];
            if has_two {
                // The decoder gives the code 0 to the symbol that comes first, even if it is the larger one or both are equal.
                symbols.push(bits.read(8)? as u16);
                counts[1] = 2;
            }
            return match symbols.iter().all(|symbol| usize::from(*symbol) < alphabet) {
                true => Ok(Self { counts, symbols }),
                false => Err(damaged("a prefix code is invalid")),
            };
        }
        let mut lengths = vec![0; alphabet];
        read_lengths(bits, &mut lengths)?;
        Self::new(&lengths)
    }

    fn new(lengths: &[u8]) -> Result<Self, ImageError> {
        let mut counts = [0; MAX_CODE_BITS + 1];
        let mut symbols = Vec::new();
        for length in 1..=MAX_CODE_BITS {
            let of_length = (0..).zip(lengths).filter(|(_, other)| usize::from(**other) == length);
            symbols.extend(of_length.map(|(symbol, _)| symbol));
            counts[length] = symbols.len() as u32 - counts[..length].iter().sum::<u32>();
        }
        // Each bit string begins with exactly one code, except that a single code has no bits.
        let share =
            (1..).zip(&counts[1..]).map(|(length, count)| count << (MAX_CODE_BITS - length)).sum::<u32>();
        if symbols.len() != 1 && share != 1 << MAX_CODE_BITS {
            return Err(damaged("a prefix code is invalid"));
        }
        Ok(Self { counts, symbols })
    }

    fn symbol(&self, bits: &mut Bits) -> Result<u32, ImageError> {
        if let [symbol] = self.symbols[..] {
            return Ok(u32::from(symbol));
        }
        let (mut code, mut first, mut before) = (0, 0, 0);
        for count in &self.counts[1..] {
            code = code << 1 | bits.read(1)?;
            first <<= 1;
            if code < first + count {
                return Ok(u32::from(self.symbols[(before + code - first) as usize]));
            }
            (first, before) = (first + count, before + count);
        }
        Err(damaged("a prefix code is invalid"))
    }
}

/// Reads the lengths of the codes of an alphabet, which are coded themselves.
fn read_lengths(bits: &mut Bits, lengths: &mut [u8]) -> Result<(), ImageError> {
    const ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut of_lengths = [0; ORDER.len()];
    let count = bits.read(4)? as usize + 4;
    for symbol in ORDER.iter().take(count) {
        of_lengths[*symbol] = bits.read(3)? as u8;
    }
    let code = Code::new(&of_lengths)?;
    let most = if bits.read(1)? == 1 {
        let size = 2 + 2 * bits.read(3)?;
        2 + bits.read(size)? as usize
    } else {
        lengths.len()
    };
    let (mut at, mut last) = (0, 8);
    for _ in 0..most {
        if at == lengths.len() {
            break;
        }
        let (length, times) = match code.symbol(bits)? {
            16 => (last, 3 + bits.read(2)?),
            17 => (0, 3 + bits.read(3)?),
            18 => (0, 11 + bits.read(7)?),
            length => (length as u8, 1),
        };
        if length != 0 {
            last = length;
        }
        let end = at + times as usize;
        lengths.get_mut(at..end).ok_or_else(|| damaged("a prefix code is too long"))?.fill(length);
        at = end;
    }
    Ok(())
}

/// Bits, from the lowest of each byte up.
struct Bits<'a> {
    data: &'a [u8],
    /// The number of bits that were read.
    at: usize,
}

impl Bits<'_> {
    /// The next `count` bits, at most 32. The first one is the lowest.
    fn read(&mut self, count: u32) -> Result<u32, ImageError> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.data.get(self.at / 8).ok_or(ImageError::Truncated { format: Format::WebP })?;
            value |= (u32::from(*byte) >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Ok(value)
    }
}

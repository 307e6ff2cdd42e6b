//! The antialiased resize of Pillow for 8-bit pixels, to the bit.
//!
//! Published models were trained and are judged with this resize. It is separable: each output pixel is a weighted sum
//! of input pixels along the row, rounded to 8 bits, and then the same along the column. When the picture shrinks, the
//! filter is stretched by the factor, so no input pixel is skipped. Weights are integers with 22 fractional bits, so
//! the result does not depend on the machine. The definition is `src/libImaging/Resample.c` of Pillow up to version 12,
//! which always begins with the rows.

use super::pixels::Rgb;

/// The weight of an input pixel by its distance, after Pillow's filters of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// A triangle of half-width 1.
    Bilinear,
    /// Keys' cubic of half-width 2 with a = -0.5.
    Bicubic,
}

impl Filter {
    /// The half-width, in output pixels when a picture shrinks and in input pixels when it grows.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, distance: f64) -> f64 {
        const A: f64 = -0.5;
        let x = distance.abs();
        match self {
            Self::Bilinear if x < 1.0 => 1.0 - x,
            Self::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// Fractional bits of a weight.
const FRACTION: u32 = 22;
/// One half, which each sum begins with, so that its shift rounds.
const HALF: i32 = 1 << (FRACTION - 1);

/// The input pixels of one output pixel, and their weights.
struct Taps {
    first: usize,
    /// Their absolute values sum up to 1.0 for the triangle and to less than 1.3 for the cubic, also where the
    /// picture's edge cuts it. Below 2.0, a sum over 8-bit values fits 32 bits.
    weights: Vec<i32>,
}

impl Taps {
    /// Of each output pixel on a side that shrinks or grows from `from` to `to` pixels.
    fn of_side(from: usize, to: usize, filter: Filter) -> Vec<Self> {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = filter.support() * stretch;
        let of_pixel = |pixel: usize| {
            let center = (pixel as f64 + 0.5) * scale;
            // A negative number becomes 0, and the fraction is cut off.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            let weight = |at: usize| filter.weight((at as f64 - center + 0.5) * (1.0 / stretch));
            let sum: f64 = (first..end).map(weight).sum();
            let to_integer = |at| {
                let share = weight(at) / sum * f64::from(1 << FRACTION);
                (share + 0.5_f64.copysign(share)) as i32
            };
            Self { first, weights: (first..end).map(to_integer).collect() }
        };
        (0..to).map(of_pixel).collect()
    }
}

fn rounded(sum: i32) -> u8 {
    (sum >> FRACTION).clamp(0, 255) as u8
}

impl Rgb {
    /// The picture at another size; its aspect is not kept. A side that keeps its length is not filtered.
    ///
    /// In addition to the result, this holds as many rows of the new width as one output row is made of: at most
    /// 2 * support * (old height / new height) + 2. Panics if a side is 0.
    pub fn resize(&self, width: u32, height: u32, filter: Filter) -> Rgb {
        assert!(width > 0 && height > 0, "a picture has at least 1 x 1 pixels, not {width} x {height}");
        let [old_width, old_height, new_width, new_height] =
            [self.width(), self.height(), width, height].map(|side| side as usize);
        let across = (old_width != new_width).then(|| Taps::of_side(old_width, new_width, filter));
        let make_row = |y: usize, out: &mut [u8]| {
            let row = &self.pixels()[y * old_width * 3..][..old_width * 3];
            match &across {
                Some(taps) => write_row(row, taps, out),
                None => out.copy_from_slice(row),
            }
        };
        let row_bytes = new_width * 3;
        let mut out = vec![0; new_height * row_bytes];
        if old_height == new_height {
            for (y, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                make_row(y, out);
            }
            return Rgb::new(width, height, out);
        }

        // Row y of the new width is in the part y % held of the ring. The windows of output rows only move down, so
        // each row is made once.
        let down = Taps::of_side(old_height, new_height, filter);
        let held = down.iter().map(|taps| taps.weights.len()).max().unwrap_or(1);
        let mut ring = vec![0; held * row_bytes];
        let mut made = 0;
        let mut sums = vec![0; row_bytes];
        for (taps, out) in down.iter().zip(out.chunks_exact_mut(row_bytes)) {
            for y in made.max(taps.first)..taps.first + taps.weights.len() {
                make_row(y, &mut ring[y % held * row_bytes..][..row_bytes]);
                made = y + 1;
            }
            sums.fill(HALF);
            for (y, weight) in (taps.first..).zip(&taps.weights) {
                let values = &ring[y % held * row_bytes..][..row_bytes];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = sum.wrapping_add(i32::from(*value).wrapping_mul(*weight));
                }
            }
            for (out, sum) in out.iter_mut().zip(&sums) {
                *out = rounded(*sum);
            }
        }
        Rgb::new(width, height, out)
    }
}

/// One row at the new width. Nearly all the time of a large picture is spent here, so red and green are summed up by
/// one multiplication, in the halves of 64 bits.
fn write_row(row: &[u8], taps: &[Taps], out: &mut [u8]) {
    let (pixels, _) = row.as_chunks::<3>();
    let (out, _) = out.as_chunks_mut::<3>();
    for (taps, out) in taps.iter().zip(out) {
        let (mut red_green, mut blue) = (i64::from(HALF) << 32 | i64::from(HALF), HALF);
        for ([r, g, b], weight) in pixels[taps.first..].iter().zip(&taps.weights) {
            let both = i64::from(*g) << 32 | i64::from(*r);
            red_green = red_green.wrapping_add(both.wrapping_mul(i64::from(*weight)));
            blue = blue.wrapping_add(i32::from(*b).wrapping_mul(*weight));
        }
        // A negative sum of red took one from that of green.
        let red = red_green as i32;
        let green = (red_green.wrapping_sub(i64::from(red)) >> 32) as i32;
        *out = [red, green, blue].map(rounded);
    }
}

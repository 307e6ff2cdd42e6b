//! Sets of Unicode characters, as sorted ranges.

use std::fmt::Write;

/// A set of code points. Ranges include both ends. They are sorted, do not touch, and contain no surrogates.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CharSet(Vec<(u32, u32)>);

impl CharSet {
    /// Every character.
    pub fn any() -> Self {
        Self(vec![(0, 0xd7ff), (0xe000, 0x10ffff)])
    }

    /// The characters in the ranges, which may be unsorted and overlap. Surrogates and numbers that are not code points
    /// are left out.
    pub fn new(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match merged.last_mut() {
                Some((_, end)) if from <= end.saturating_add(1) => *end = to.max(*end),
                _ => merged.push((from, to)),
            }
        }
        let characters = |&(from, to): &(u32, u32)| {
            let within = move |(low, high): (u32, u32)| (from.max(low), to.min(high));
            Self::any().0.into_iter().map(within).filter(|(from, to)| from <= to)
        };
        Self(merged.iter().flat_map(characters).collect())
    }

    /// The characters that are not in the set.
    pub fn negated(&self) -> Self {
        let mut gaps = Vec::with_capacity(self.0.len() + 1);
        let mut next = 0;
        for &(from, to) in &self.0 {
            if next < from {
                gaps.push((next, from - 1));
            }
            next = to + 1;
        }
        gaps.push((next, u32::MAX));
        Self::new(gaps)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of characters.
    pub fn len(&self) -> usize {
        self.0.iter().map(|(from, to)| (to - from + 1) as usize).sum()
    }

    /// The number of ranges.
    pub fn ranges(&self) -> usize {
        self.0.len()
    }

    pub fn union<'a>(sets: impl IntoIterator<Item = &'a Self>) -> Self {
        Self::new(sets.into_iter().flat_map(|set| set.0.iter().copied()).collect())
    }

    pub fn intersects(&self, other: &Self) -> bool {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.0 <= y.1 && y.0 <= x.1 {
                return true;
            }
            if x.1 < y.1 {
                a.next()
            } else {
                b.next()
            };
        }
        false
    }

    /// A regex that matches one character of the set. It contains no slash and no line end.
    pub fn regex(&self) -> String {
        let character = |code: u32| match char::from_u32(code) {
            Some(letter) if letter.is_ascii_alphanumeric() => letter.to_string(),
            _ => format!("\\x{{{code:X}}}"),
        };
        if let [(from, to)] = self.0[..]
            && from == to
        {
            return character(from);
        }
        let mut regex = "[".to_owned();
        for &(from, to) in &self.0 {
            regex += &character(from);
            if from < to {
                write!(regex, "-{}", character(to)).expect("writing to a String cannot fail");
            }
        }
        regex + "]"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_operations_yield_only_characters() {
        let digits = CharSet::new(vec![(0x35, 0x39), (0x30, 0x34)]);
        assert_eq!(digits, CharSet(vec![(0x30, 0x39)]));
        assert_eq!(digits.negated().negated(), digits);
        assert!(!digits.intersects(&digits.negated()));
        assert_eq!(CharSet::union([&digits, &digits.negated()]), CharSet::any());
        assert_eq!(CharSet::new(vec![(0, u32::MAX)]), CharSet::any());
        assert!(CharSet::any().negated().is_empty() && CharSet::new(vec![(0xd800, 0xdfff)]).is_empty());
        assert_eq!(digits.regex(), "[0-9]");
        assert_eq!(CharSet::new(vec![(0x2f, 0x2f)]).regex(), "\\x{2F}");
    }
}

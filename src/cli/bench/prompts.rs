//! Prompts: sentences of common words, drawn from a seed. No two prompts have the same beginning, so that no server can
//! reuse its prefix cache.

use std::sync::atomic::{AtomicU64, Ordering};

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

const NOUNS: [&str; 40] = [
    "river", "garden", "teacher", "window", "letter", "village", "doctor", "bridge", "forest", "kitchen",
    "market", "captain", "winter", "summer", "engine", "mountain", "painter", "island", "station", "library",
    "farmer", "tower", "harbour", "musician", "morning", "evening", "field", "street", "machine", "question",
    "answer", "story", "bird", "horse", "child", "mother", "friend", "king", "ship", "city",
];
const ADJECTIVES: [&str; 24] = [
    "old", "young", "quiet", "bright", "heavy", "small", "great", "green", "white", "slow", "early", "late",
    "warm", "cold", "distant", "simple", "strange", "careful", "happy", "empty", "narrow", "broken",
    "famous", "patient",
];
const VERBS: [&str; 24] = [
    "finds",
    "carries",
    "remembers",
    "follows",
    "watches",
    "builds",
    "leaves",
    "opens",
    "answers",
    "paints",
    "crosses",
    "visits",
    "describes",
    "repairs",
    "sells",
    "hears",
    "keeps",
    "loses",
    "measures",
    "brings",
    "writes",
    "counts",
    "hides",
    "saves",
];
const PLACES: [&str; 16] = [
    "near", "behind", "beside", "under", "above", "after", "before", "without", "against", "inside",
    "outside", "along", "beyond", "with", "from", "towards",
];

/// Words per token, until the server has counted the tokens of a text.
const WORDS_PER_TOKEN: f64 = 0.75;

/// Generates one text after the other.
pub struct Prompts {
    seed: u64,
    next: AtomicU64,
    pub words_per_token: f64,
}

impl Prompts {
    pub fn new(seed: u64) -> Self {
        Self { seed, next: AtomicU64::new(0), words_per_token: WORDS_PER_TOKEN }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Number of words that make about `tokens` tokens.
    pub fn words(&self, tokens: u32) -> usize {
        ((f64::from(tokens) * self.words_per_token) as usize).max(1)
    }

    /// A new text of about `tokens` tokens, which asks for a long answer.
    pub fn question(&self, tokens: u32) -> String {
        const REQUEST: &str = "Continue this story at length.";
        let words = self.words(tokens).saturating_sub(REQUEST.split(' ').count());
        format!("{}{REQUEST}", self.text(words.max(1)))
    }

    /// A new text of `words` words, in sentences that end with a blank.
    fn text(&self, words: usize) -> String {
        // Each text has its own random stream, so the texts do not depend on which thread asks first.
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(self.next.fetch_add(1, Ordering::Relaxed));
        let mut text = String::new();
        let mut left = words;
        while left > 0 {
            let sentence = sentence(&mut rng);
            let take = left.min(sentence.len());
            left -= take;
            for (i, word) in sentence[..take].iter().enumerate() {
                let (first, rest) = word.split_at(1);
                text.push_str(&if i == 0 { first.to_uppercase() } else { first.to_owned() });
                text.push_str(rest);
                text.push_str(if i + 1 == take { ". " } else { " " });
            }
        }
        text
    }
}

/// A sentence such as "The old captain carries a narrow bridge towards 17 green ships".
fn sentence(rng: &mut ChaCha8Rng) -> Vec<String> {
    fn any<'a>(rng: &mut ChaCha8Rng, words: &[&'a str]) -> &'a str {
        words.choose(rng).expect("no list is empty")
    }
    let mut words = vec![any(rng, &["the", "a", "every", "this", "one", "no"])];
    let thing = |rng: &mut ChaCha8Rng, words: &mut Vec<&'static str>| {
        if rng.random_bool(0.7) {
            words.push(any(rng, &ADJECTIVES));
        }
        words.push(any(rng, &NOUNS));
    };
    thing(rng, &mut words);
    words.push(any(rng, &VERBS));
    words.push(any(rng, &["the", "a", "its", "some", "another"]));
    thing(rng, &mut words);
    if rng.random_bool(0.6) {
        words.extend([any(rng, &PLACES), "the"]);
        thing(rng, &mut words);
    }
    words.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_seed_makes_the_same_texts_and_no_two_begin_alike() {
        let ask = |seed| {
            let prompts = Prompts::new(seed);
            (0..200).map(|_| prompts.question(100)).collect::<Vec<_>>()
        };
        let texts = ask(7);
        assert_eq!(texts, ask(7));
        assert_ne!(texts, ask(8));
        let beginnings: HashSet<_> =
            texts.iter().map(|text| text.split(' ').take(8).collect::<Vec<_>>()).collect();
        assert_eq!(beginnings.len(), texts.len());
    }

    #[test]
    fn a_text_has_as_many_words_as_make_its_tokens() {
        let mut prompts = Prompts::new(1);
        for (words_per_token, tokens, words) in
            [(0.75, 100, 75), (0.5, 1000, 500), (2.0, 30, 60), (0.5, 1, 6)]
        {
            prompts.words_per_token = words_per_token;
            assert_eq!(prompts.question(tokens).split_whitespace().count(), words);
        }
    }
}

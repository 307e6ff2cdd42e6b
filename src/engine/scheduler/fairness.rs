//! Fairness between clients: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024).
//! The client with the lowest counter goes first.
//!
//! All clients wait while the mask of one answer is computed. So its time counts as the tokens that could have been
//! computed in that time.

use std::collections::HashMap;
use std::time::Duration;

use crate::engine::pace::Pace;
use crate::engine::request::ClientId;

/// The token counters of all clients that have a sequence.
#[derive(Debug, Default)]
pub(super) struct Served(HashMap<ClientId, Counter>);

#[derive(Debug, Clone, Copy, Default)]
struct Counter {
    tokens: u64,
    /// Time of the client's masks that is not yet converted to tokens.
    masking: Duration,
}

impl Served {
    /// Adds a client, unless it has a counter. The counter starts at the lowest value of all counters, so that a client
    /// that comes back after a pause does not get the tokens that others got in the meantime.
    pub(super) fn join(&mut self, client: ClientId) {
        let tokens = self.0.values().map(|counter| counter.tokens).min().unwrap_or(0);
        self.0.entry(client).or_insert(Counter { tokens, ..Counter::default() });
    }

    pub(super) fn forget(&mut self, client: ClientId) {
        self.0.remove(&client);
    }

    pub(super) fn knows(&self, client: ClientId) -> bool {
        self.0.contains_key(&client)
    }

    pub(super) fn tokens(&self, client: ClientId) -> u64 {
        self.0[&client].tokens
    }

    pub(super) fn add_tokens(&mut self, client: ClientId, tokens: usize) {
        self.of(client).tokens += tokens as u64;
    }

    /// Adds the time that masks of a client took.
    pub(super) fn add_mask_time(&mut self, client: ClientId, time: Duration) {
        self.of(client).masking += time;
    }

    /// Converts the time of masks to tokens. The remainder, shorter than the time of a token, is kept for later.
    pub(super) fn charge(&mut self, pace: &Pace) {
        let Some(token) = pace.per_token() else { return };
        for Counter { tokens, masking } in self.0.values_mut() {
            *tokens += (masking.as_nanos() / token.as_nanos()) as u64;
            *masking = Duration::from_nanos((masking.as_nanos() % token.as_nanos()) as u64);
        }
    }

    fn of(&mut self, client: ClientId) -> &mut Counter {
        self.0.get_mut(&client).expect("the client of a sequence has a counter")
    }
}

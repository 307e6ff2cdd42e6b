//! Fairness between clients: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024).
//! The client with the lowest counter goes first.
//!
//! All clients wait while a mask is made, so its time counts as the tokens that could have been computed meanwhile.

use std::collections::HashMap;
use std::time::Duration;

use crate::engine::pace::Pace;
use crate::engine::request::ClientId;

/// The counters of all clients that have a sequence here.
#[derive(Debug, Default)]
pub(super) struct Served(HashMap<ClientId, Given>);

#[derive(Debug, Clone, Copy, Default)]
struct Given {
    tokens: u64,
    /// Time of the client's masks that is not counted as tokens yet.
    masking: Duration,
}

impl Served {
    /// Adds a client, unless it is known. Its counter starts at the lowest counter of all, so that a client that comes
    /// back after a pause has no claim to what others got meanwhile.
    pub(super) fn join(&mut self, client: ClientId) {
        let tokens = self.0.values().map(|given| given.tokens).min().unwrap_or(0);
        self.0.entry(client).or_insert(Given { tokens, ..Given::default() });
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

    pub(super) fn give(&mut self, client: ClientId, tokens: usize) {
        self.of(client).tokens += tokens as u64;
    }

    /// Adds time that masks of a client took.
    pub(super) fn took(&mut self, client: ClientId, time: Duration) {
        self.of(client).masking += time;
    }

    /// Converts the time of masks to tokens, and keeps the rest that is too short for a token.
    pub(super) fn charge(&mut self, pace: &Pace) {
        let Some(token) = pace.per_token() else { return };
        for Given { tokens, masking } in self.0.values_mut() {
            *tokens += (masking.as_nanos() / token.as_nanos()) as u64;
            *masking = Duration::from_nanos((masking.as_nanos() % token.as_nanos()) as u64);
        }
    }

    fn of(&mut self, client: ClientId) -> &mut Given {
        self.0.get_mut(&client).expect("the client of a sequence is known")
    }
}

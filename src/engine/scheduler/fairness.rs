//! Fairness between clients: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024).
//! The client with the lowest counter goes first. The counter of a client that leaves is remembered while it is higher than
//! the lowest one of the others, so that a client does not get more by sending its requests one after another.
//!
//! All clients wait while the mask of one answer is computed. So its time counts as the tokens that could have been
//! computed in that time.

use std::collections::HashMap;
use std::time::Duration;

use crate::engine::pace::Pace;
use crate::engine::request::ClientId;

/// The most clients without a sequence whose counters are remembered.
const MAX_REMEMBERED: usize = 1024;

/// The token counters of all clients that have a sequence.
#[derive(Debug, Default)]
pub(super) struct Served {
    present: HashMap<ClientId, Counter>,
    /// The remembered counters of clients without a sequence. Empty if no client has one.
    absent: HashMap<ClientId, Counter>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counter {
    tokens: u64,
    /// Time of the client's masks that is not yet converted to tokens.
    masking: Duration,
}

impl Served {
    /// Adds a client, unless it has a counter. The counter starts at least at the lowest value of all counters, so that a
    /// client that comes back after a pause does not get the tokens that others got in the meantime.
    pub(super) fn join(&mut self, client: ClientId) {
        let least = self.least().unwrap_or(0);
        let remembered = self.absent.remove(&client).unwrap_or_default();
        let counter = Counter { tokens: remembered.tokens.max(least), ..remembered };
        self.present.entry(client).or_insert(counter);
    }

    /// The client has no sequence any longer.
    pub(super) fn leave(&mut self, client: ClientId) {
        let Some(counter) = self.present.remove(&client) else { return };
        let Some(least) = self.least() else {
            self.absent.clear();
            return;
        };
        self.absent.insert(client, counter);
        // A client that was served less than all others would start at the lowest value anyway.
        self.absent.retain(|_, counter| counter.tokens > least || !counter.masking.is_zero());
        if self.absent.len() > MAX_REMEMBERED {
            let lowest =
                self.absent.iter().min_by_key(|(_, counter)| counter.tokens).map(|(client, _)| *client);
            self.absent.remove(&lowest.expect("not empty"));
        }
    }

    /// The lowest counter of the clients that have a sequence.
    fn least(&self) -> Option<u64> {
        self.present.values().map(|counter| counter.tokens).min()
    }

    pub(super) fn knows(&self, client: ClientId) -> bool {
        self.present.contains_key(&client)
    }

    pub(super) fn tokens(&self, client: ClientId) -> u64 {
        self.present[&client].tokens
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
        for Counter { tokens, masking } in self.present.values_mut().chain(self.absent.values_mut()) {
            *tokens += (masking.as_nanos() / token.as_nanos()) as u64;
            *masking = Duration::from_nanos((masking.as_nanos() % token.as_nanos()) as u64);
        }
    }

    fn of(&mut self, client: ClientId) -> &mut Counter {
        self.present.get_mut(&client).expect("the client of a sequence has a counter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_comes_back_gets_neither_what_others_got_nor_what_it_got_before() {
        let mut served = Served::default();
        let rejoin = |served: &mut Served| {
            served.leave(1);
            assert!(!served.knows(1));
            served.join(1);
            served.tokens(1)
        };
        [1, 2].into_iter().for_each(|client| served.join(client));
        served.add_tokens(1, 100);
        served.add_tokens(2, 10);
        assert_eq!(rejoin(&mut served), 100, "it got more than the other");
        served.add_tokens(2, 200);
        assert_eq!(rejoin(&mut served), 210, "the other got more meanwhile");
        served.leave(2);
        assert_eq!(rejoin(&mut served), 0, "no other client is there");
    }

    #[test]
    fn a_bounded_number_of_absent_clients_is_remembered_and_those_that_got_the_most() {
        let mut served = Served::default();
        served.join(0);
        let clients = 2 * MAX_REMEMBERED;
        for client in 1..=clients {
            served.join(client as ClientId);
            served.add_tokens(client as ClientId, client);
            served.leave(client as ClientId);
        }
        assert_eq!(served.absent.len(), MAX_REMEMBERED);
        served.join(clients as ClientId);
        assert_eq!(served.tokens(clients as ClientId), clients as u64);
    }
}

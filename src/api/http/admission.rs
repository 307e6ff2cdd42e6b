//! Places of which only so many are taken at once, given out in fair turns: for bodies that are read, and for processors.
//!
//! Each client has a line of its own, in order of arrival. A free place goes to the client that has had the least, and of
//! two that had as much to the one that waits longer. A place costs one unit, so clients that charge nothing more take
//! turns; whoever holds one may charge more for it, in what units it likes, as long as all do.
//!
//! What somebody had counts while others are here. Whoever comes, or comes back after a pause, has had at least what the
//! least of those here has: absence earns nothing. When nobody is left, all of it is forgotten.
//!
//! There is no clock, no task and no I/O here, and no bound on how many wait, or for how long: who waits has to be bounded
//! by whoever lets it. Invariants: no more places are taken than there are, nor by one client than one may take; while a
//! place is free, whoever waits has as many as one may take; and somebody who stops waiting, at whatever point, leaves
//! nothing behind, neither in a line nor of a place that was just given to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter;
use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

use crate::engine::ClientId;

/// Clients that are not here, and of which it is known what they had.
const MAX_REMEMBERED: usize = 1024;

#[derive(Clone)]
pub(in crate::api) struct Turns(Arc<Mutex<Lines>>);

/// One place, free again when dropped.
pub(in crate::api) struct Turn {
    turns: Turns,
    client: ClientId,
    cost: u64,
}

/// One that waits; or was given a turn, and has not looked yet.
struct Waiting<'a> {
    turns: &'a Turns,
    client: ClientId,
    ticket: Ticket,
    given: oneshot::Receiver<Turn>,
}

/// In order of arrival.
type Ticket = u64;

struct Lines {
    places: usize,
    free: usize,
    /// For one client.
    most: usize,
    tickets: Ticket,
    waiting: usize,
    /// Clients that are here, and some that are remembered.
    clients: HashMap<ClientId, Client>,
    /// Clients that wait for a place, or hold one, by what they had.
    here: BTreeSet<(u64, ClientId)>,
    /// All others.
    remembered: BTreeSet<(u64, ClientId)>,
    /// Clients that may be given a place, in the order in which they are.
    next: BTreeSet<(u64, Ticket, ClientId)>,
    /// What the least of those here had.
    least: u64,
}

#[derive(Default)]
struct Client {
    had: u64,
    held: usize,
    line: BTreeMap<Ticket, oneshot::Sender<Turn>>,
}

impl Turns {
    /// `most` of the places are for one client; of both there is at least one.
    pub fn new(places: usize, most: usize) -> Self {
        assert!(places > 0 && most > 0, "nobody would ever get a turn");
        Self(Arc::new(Mutex::new(Lines {
            places,
            free: places,
            most,
            tickets: 0,
            waiting: 0,
            clients: HashMap::new(),
            here: BTreeSet::new(),
            remembered: BTreeSet::new(),
            next: BTreeSet::new(),
            least: 0,
        })))
    }

    /// The client's turn, when it comes. It stands in line from the first poll on, until this is dropped.
    pub async fn take(&self, client: ClientId) -> Turn {
        let (give, given) = oneshot::channel();
        let ticket = self.change(|lines| lines.line_up(client, give));
        let mut waiting = Waiting { turns: self, client, ticket, given };
        (&mut waiting.given).await.expect("nobody but who waits drops its place in line")
    }

    /// How many hold a place or wait for one.
    pub fn count(&self) -> usize {
        self.change(|lines| lines.places - lines.free + lines.waiting)
    }

    /// Every change ends with free places given to those who may have them.
    fn change<T>(&self, change: impl FnOnce(&mut Lines) -> T) -> T {
        let mut lines = self.0.lock().expect("nothing panics under this lock");
        let result = change(&mut lines);
        let given: Vec<_> = iter::from_fn(|| lines.give()).collect();
        drop(lines);
        for (client, give) in given {
            // Where nobody waits for it any more, this drops the turn, and that gives it to the next.
            drop(give.send(Turn { turns: self.clone(), client, cost: 0 }));
        }
        result
    }
}

impl Turn {
    /// Counts so much more as what the client had, from the turn's end on.
    pub fn charge(&mut self, cost: u64) {
        self.cost = self.cost.saturating_add(cost);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.change(|lines| lines.take_back(self.client, self.cost));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // If it is in no line, it was given a turn, which goes with the channel.
        drop(self.turns.change(|lines| lines.leave(self.client, self.ticket)));
    }
}

impl Lines {
    fn line_up(&mut self, client: ClientId, give: oneshot::Sender<Turn>) -> Ticket {
        self.tickets += 1;
        let ticket = self.tickets;
        self.waiting += 1;
        let least = self.least;
        self.update(client, |client| {
            client.had = client.had.max(least);
            client.line.insert(ticket, give);
        });
        ticket
    }

    /// The way to whoever is next, if anybody may have a place and there is one.
    fn give(&mut self) -> Option<(ClientId, oneshot::Sender<Turn>)> {
        let &(_, ticket, client) = self.next.first().filter(|_| self.free > 0)?;
        self.free -= 1;
        self.waiting -= 1;
        let give = self.update(client, |client| {
            client.held += 1;
            client.had = client.had.saturating_add(1);
            client.line.remove(&ticket)
        });
        give.map(|give| (client, give))
    }

    fn take_back(&mut self, client: ClientId, cost: u64) {
        self.free += 1;
        self.update(client, |client| {
            client.held -= 1;
            client.had = client.had.saturating_add(cost);
        });
    }

    fn leave(&mut self, client: ClientId, ticket: Ticket) -> Option<oneshot::Sender<Turn>> {
        let is_there = self.clients.get(&client).is_some_and(|client| client.line.contains_key(&ticket));
        if !is_there {
            return None;
        }
        self.waiting -= 1;
        self.update(client, |client| client.line.remove(&ticket))
    }

    /// Changes one client, and keeps the orders true.
    fn update<T>(&mut self, id: ClientId, change: impl FnOnce(&mut Client) -> T) -> T {
        let client = self.clients.entry(id).or_default();
        let list = if client.is_here() { &mut self.here } else { &mut self.remembered };
        list.remove(&(client.had, id));
        if let Some(ticket) = client.first(self.most) {
            self.next.remove(&(client.had, ticket, id));
        }
        let result = change(client);
        let list = if client.is_here() { &mut self.here } else { &mut self.remembered };
        list.insert((client.had, id));
        if let Some(ticket) = client.first(self.most) {
            self.next.insert((client.had, ticket, id));
        }
        self.forget();
        result
    }

    /// Forgets what would count no more; and, of too many, who had the least.
    fn forget(&mut self) {
        let Some(&(least, _)) = self.here.first() else {
            self.clients.clear();
            self.remembered.clear();
            self.least = 0;
            return;
        };
        self.least = least;
        while let Some(&(had, id)) = self.remembered.first()
            && (had <= least || self.remembered.len() > MAX_REMEMBERED)
        {
            self.remembered.pop_first();
            self.clients.remove(&id);
        }
    }
}

impl Client {
    fn is_here(&self) -> bool {
        self.held > 0 || !self.line.is_empty()
    }

    /// Who is first in its line, if it may be given a place.
    fn first(&self, most: usize) -> Option<Ticket> {
        self.line.keys().next().copied().filter(|_| self.held < most)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[derive(Default)]
    struct Bell(AtomicBool);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    impl Bell {
        fn rang(&self) -> bool {
            self.0.swap(false, Ordering::SeqCst)
        }
    }

    /// One that waits, as a task would.
    struct Waiter {
        client: ClientId,
        turn: Pin<Box<dyn Future<Output = Turn>>>,
        bell: Arc<Bell>,
    }

    impl Waiter {
        /// Lines up.
        fn new(turns: &Turns, client: ClientId) -> (Self, Poll<Turn>) {
            let turns = turns.clone();
            let turn = Box::pin(async move { turns.take(client).await });
            let mut waiter = Self { client, turn, bell: Arc::default() };
            let first = waiter.look();
            (waiter, first)
        }

        fn look(&mut self) -> Poll<Turn> {
            let waker = Waker::from(Arc::clone(&self.bell));
            self.turn.as_mut().poll(&mut Context::from_waker(&waker))
        }
    }

    /// What is to happen, by looking at everybody each time.
    #[derive(Default)]
    struct Model {
        places: usize,
        most: usize,
        /// In order of arrival: number and client.
        line: Vec<(usize, ClientId)>,
        /// Waiters that were given a place: number and client.
        given: Vec<(usize, ClientId)>,
        had: BTreeMap<ClientId, u64>,
    }

    impl Model {
        fn held(&self, client: ClientId) -> usize {
            self.given.iter().filter(|(_, other)| *other == client).count()
        }

        fn is_here(&self, client: ClientId) -> bool {
            self.held(client) > 0 || self.line.iter().any(|(_, other)| *other == client)
        }

        fn line_up(&mut self, number: usize, client: ClientId) {
            let here = self.had.iter().filter(|(client, _)| self.is_here(**client));
            let least = here.map(|(_, had)| *had).min();
            if least.is_none() {
                self.had.clear();
            }
            let had = self.had.entry(client).or_default();
            *had = (*had).max(least.unwrap_or(0));
            self.line.push((number, client));
            self.give();
        }

        fn give(&mut self) {
            while self.given.len() < self.places {
                let may = |(_, (_, client)): &(usize, &(usize, ClientId))| self.held(*client) < self.most;
                let next = self.line.iter().enumerate().filter(may);
                let Some((at, _)) = next.min_by_key(|(_, (number, client))| (self.had[client], *number))
                else {
                    return;
                };
                let (number, client) = self.line.remove(at);
                *self.had.get_mut(&client).expect("known") += 1;
                self.given.push((number, client));
            }
        }

        fn take_back(&mut self, number: usize, cost: u64) {
            let at = self.given.iter().position(|(other, _)| *other == number).expect("given");
            let (_, client) = self.given.remove(at);
            *self.had.get_mut(&client).expect("known") += cost;
            self.give();
        }
    }

    /// Random comings, goings and givings back, beside the model.
    fn holds_to_the_model(rng: &mut ChaCha8Rng) {
        let (places, most) = (rng.random_range(1..6), rng.random_range(1..4));
        let clients = rng.random_range(1..6);
        let turns = Turns::new(places, most);
        let mut model = Model { places, most, ..Model::default() };
        // By number; whoever was given a turn and has not looked is still among those who wait.
        let (mut waiting, mut holding) = (BTreeMap::new(), BTreeMap::new());
        for number in 0..300 {
            match rng.random_range(0..10) {
                0..4 => {
                    let (waiter, first) = Waiter::new(&turns, rng.random_range(0..clients));
                    model.line_up(number, waiter.client);
                    match first {
                        Poll::Ready(turn) => drop(holding.insert(number, turn)),
                        Poll::Pending => drop(waiting.insert(number, waiter)),
                    }
                }
                4..7 => {
                    let held: Vec<usize> = holding.keys().copied().collect();
                    let Some(&number) = held.get(rng.random_range(0..held.len().max(1))) else { continue };
                    let cost = rng.random_range(0..20);
                    let mut turn: Turn = holding.remove(&number).expect("held");
                    turn.charge(cost);
                    drop(turn);
                    model.take_back(number, cost);
                }
                7..9 => {
                    // Whoever was given a turn looks at once, sometimes.
                    let numbers: Vec<usize> = waiting.keys().copied().collect();
                    for number in numbers {
                        let waiter: &mut Waiter = waiting.get_mut(&number).expect("waits");
                        let is_given = model.given.iter().any(|(other, _)| *other == number);
                        assert_eq!(waiter.bell.rang(), is_given, "{number} is woken when it is its turn");
                        match waiter.look() {
                            Poll::Ready(turn) => {
                                assert!(is_given, "{number} is not next");
                                holding.insert(number, turn);
                                waiting.remove(&number);
                            }
                            Poll::Pending => assert!(!is_given, "{number} was forgotten"),
                        }
                    }
                }
                _ => {
                    let numbers: Vec<usize> = waiting.keys().copied().collect();
                    let Some(&number) = numbers.get(rng.random_range(0..numbers.len().max(1))) else {
                        continue;
                    };
                    waiting.remove(&number);
                    if model.given.iter().any(|(other, _)| *other == number) {
                        model.take_back(number, 0);
                    } else {
                        model.line.retain(|(other, _)| *other != number);
                        model.give();
                    }
                }
            }
            let lines = turns.0.lock().unwrap();
            let taken = lines.places - lines.free;
            assert_eq!((taken, lines.waiting), (model.given.len(), model.line.len()));
            assert!(taken <= places);
            for (id, client) in &lines.clients {
                assert!(client.held <= most);
                assert_eq!((client.held, client.is_here()), (model.held(*id), model.is_here(*id)));
            }
            assert_eq!(lines.here.len() + lines.remembered.len(), lines.clients.len());
        }
        drop((waiting, holding));
        assert_eq!(turns.count(), 0);
        assert!(turns.0.lock().unwrap().clients.is_empty(), "nobody is here, and nobody remembered");
    }

    #[test]
    fn turns_are_given_as_they_should_be_whoever_comes_and_leaves() {
        let seed = 0x7175;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..400 {
            holds_to_the_model(&mut rng);
        }
    }

    /// The clients in the order in which they get their turns, each of which costs what `cost` says.
    fn order(turns: &Turns, mut line: Vec<Waiter>, cost: impl Fn(ClientId) -> u64) -> Vec<ClientId> {
        let mut order = Vec::new();
        while !line.is_empty() {
            let at = line.iter().position(|waiter| waiter.bell.rang()).expect("somebody's turn it is");
            let mut waiter = line.remove(at);
            let Poll::Ready(mut turn) = waiter.look() else { panic!("woken for nothing") };
            turn.charge(cost(waiter.client));
            order.push(waiter.client);
        }
        assert_eq!(turns.count(), 0);
        order
    }

    /// All of one place taken by client 9, and then these, who wait for it.
    fn line_of(turns: &Turns, clients: &[ClientId]) -> Vec<Waiter> {
        let (_first, Poll::Ready(taken)) = Waiter::new(turns, 9) else { panic!("a place is free") };
        let line = clients.iter().map(|client| Waiter::new(turns, *client).0).collect();
        drop(taken);
        line
    }

    #[test]
    fn clients_take_turns_and_each_is_served_in_its_order() {
        let turns = Turns::new(1, 1);
        let line = line_of(&turns, &[1, 1, 1, 1, 2, 2, 3]);
        assert_eq!(order(&turns, line, |_| 0), [1, 2, 3, 1, 2, 1, 1]);
    }

    #[test]
    fn who_had_the_least_is_next() {
        let turns = Turns::new(1, 1);
        let line = line_of(&turns, &[1, 1, 1, 2, 2, 2, 2, 2, 2]);
        let cost = |client| if client == 1 { 299 } else { 99 };
        assert_eq!(order(&turns, line, cost), [1, 2, 2, 2, 1, 2, 2, 2, 1]);
    }

    #[test]
    fn who_comes_back_has_what_it_owes_and_nothing_for_its_absence() {
        let turns = Turns::new(1, 1);
        let (_a, Poll::Ready(mut costly)) = Waiter::new(&turns, 1) else { panic!("free") };
        let second = Waiter::new(&turns, 2).0;
        costly.charge(1000);
        drop(costly);
        // Client 2 has the place, has not looked yet, and waits once more; client 1 is not here meanwhile.
        let mut line =
            vec![second, Waiter::new(&turns, 2).0, Waiter::new(&turns, 1).0, Waiter::new(&turns, 2).0];
        assert_eq!(turns.count(), 4);
        // A third, who was never here, does not come before all that the second does.
        line.extend((0..2).map(|_| Waiter::new(&turns, 3).0));
        assert_eq!(order(&turns, line, |_| 0), [2, 2, 3, 2, 3, 1]);
        // Nobody was left, so nothing is owed.
        let line = line_of(&turns, &[1, 2]);
        assert_eq!(order(&turns, line, |_| 0), [1, 2]);
    }

    #[test]
    fn a_client_that_waits_for_its_own_places_keeps_nobody_waiting() {
        let turns = Turns::new(4, 2);
        let mut mine: Vec<_> = (0..5).map(|_| Waiter::new(&turns, 1)).collect();
        assert_eq!(mine.iter().filter(|(_, turn)| turn.is_ready()).count(), 2);
        let (_other, turn) = Waiter::new(&turns, 2);
        assert!(turn.is_ready());
        // The next of its line has the use of one that is free again.
        drop(mine.remove(0));
        let next = mine[1].0.look();
        assert!(next.is_ready() && mine[2].0.look().is_pending());
    }

    #[test]
    fn so_many_are_remembered_and_no_more() {
        let turns = Turns::new(2, 2);
        let (_here, here) = Waiter::new(&turns, 0);
        for client in 1..3000 {
            let (_waiter, Poll::Ready(mut turn)) = Waiter::new(&turns, client) else { panic!("free") };
            turn.charge(client);
        }
        let lines = turns.0.lock().unwrap();
        assert_eq!((lines.clients.len(), lines.remembered.len()), (MAX_REMEMBERED + 1, MAX_REMEMBERED));
        assert!(lines.clients.contains_key(&2999), "who had the most");
        drop(lines);
        drop(here);
        assert!(turns.0.lock().unwrap().clients.is_empty());
    }

    #[test]
    fn threads_that_come_and_leave_at_once_lose_no_place() {
        let turns = Turns::new(3, 2);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let turns = &turns;
                scope.spawn(move || {
                    let mut rng = ChaCha8Rng::seed_from_u64(thread);
                    for _ in 0..2000 {
                        let (mut waiter, first) = Waiter::new(turns, rng.random_range(0..4));
                        for _ in 0..rng.random_range(0..3) {
                            if first.is_ready() || waiter.look().is_ready() {
                                break;
                            }
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(turns.count(), 0);
        let (_one, one) = Waiter::new(&turns, 1);
        let (_two, two) = Waiter::new(&turns, 2);
        let (_three, three) = Waiter::new(&turns, 3);
        assert!(one.is_ready() && two.is_ready() && three.is_ready());
    }
}

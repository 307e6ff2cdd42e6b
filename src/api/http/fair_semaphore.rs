//! Hands out a fixed number of places in turns that are fair between clients: places for bodies that are read, places on
//! processors, and places to decode images.
//!
//! Each client has its own queue, in order of arrival. A free place goes to the present client that was served
//! least. If two clients were served equally, it goes to the one whose first request waits longer. A place costs one
//! unit, so clients take turns if nothing more is charged. The holder of a place may charge more for it, in any unit,
//! as long as all holders use the same one.
//!
//! A client is present while it waits for a place or holds one. What a client was served counts while others are
//! present. A client that comes, or comes back after a pause, counts as served at least as much as the least served
//! present client: absence earns nothing. When no client is present, all of it is forgotten.
//!
//! This module has no clock, no task and no I/O. It bounds neither how many requests wait nor for how long: its callers
//! do. Invariants: no more places are taken than there are, nor more by one client than one client may take; a client
//! waits while a place is free only if it has as many places as one client may take; a request that stops waiting, at
//! any point, keeps neither a position in a queue nor a place that it was just given.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter;
use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

use crate::engine::ClientId;

/// The most clients that are not present and whose service is remembered.
const MAX_REMEMBERED: usize = 1024;

#[derive(Clone)]
pub(in crate::api) struct FairSemaphore(Arc<Mutex<Lines>>);

/// A taken place. Dropping it frees the place.
pub(in crate::api) struct FairPermit {
    turns: FairSemaphore,
    client: ClientId,
    cost: u64,
}

/// A request that waits for a place, or that was given one and was not polled since.
struct Waiting<'a> {
    turns: &'a FairSemaphore,
    client: ClientId,
    ticket: Ticket,
    given: oneshot::Receiver<FairPermit>,
}

/// Number of a request in the order of arrival.
type Ticket = u64;

struct Lines {
    places: usize,
    free: usize,
    /// The most places of one client.
    most: usize,
    tickets: Ticket,
    waiting: usize,
    /// The clients that are present, and some that are remembered.
    clients: HashMap<ClientId, Client>,
    /// The clients that are present, by what they were served.
    present: BTreeSet<(u64, ClientId)>,
    /// The remembered clients that are not present, by what they were served.
    remembered: BTreeSet<(u64, ClientId)>,
    /// The clients that may be given a place, in the order in which they get one.
    next: BTreeSet<(u64, Ticket, ClientId)>,
    /// The service of the present client that was served least.
    least: u64,
}

#[derive(Default)]
struct Client {
    served: u64,
    held: usize,
    line: BTreeMap<Ticket, oneshot::Sender<FairPermit>>,
}

impl FairSemaphore {
    /// A number of places, of which one client may take `most`. Both numbers are at least 1.
    pub fn new(places: usize, most: usize) -> Self {
        assert!(places > 0 && most > 0, "a client can get a turn");
        Self(Arc::new(Mutex::new(Lines {
            places,
            free: places,
            most,
            tickets: 0,
            waiting: 0,
            clients: HashMap::new(),
            present: BTreeSet::new(),
            remembered: BTreeSet::new(),
            next: BTreeSet::new(),
            least: 0,
        })))
    }

    /// Waits for the client's turn. The request waits in the queue from the first poll of the future until the
    /// future is dropped.
    pub async fn take(&self, client: ClientId) -> FairPermit {
        let (give, given) = oneshot::channel();
        let ticket = self.change(|lines| lines.line_up(client, give));
        let mut waiting = Waiting { turns: self, client, ticket, given };
        (&mut waiting.given).await.expect("only the waiting request leaves the queue")
    }

    /// The number of requests that hold a place or wait for one.
    pub fn count(&self) -> usize {
        self.change(|lines| lines.places - lines.free + lines.waiting)
    }

    /// Makes a change, and then gives the free places to the clients that may have them.
    fn change<T>(&self, change: impl FnOnce(&mut Lines) -> T) -> T {
        let mut lines = self.0.lock().expect("nothing panics under this lock");
        let result = change(&mut lines);
        let given: Vec<_> = iter::from_fn(|| lines.give()).collect();
        drop(lines);
        for (client, give) in given {
            // If the request no longer waits, this drops the turn, which frees the place for the next request.
            drop(give.send(FairPermit { turns: self.clone(), client, cost: 0 }));
        }
        result
    }
}

impl FairPermit {
    /// Adds to the cost of the turn. The client counts as served that much more from the turn's end on.
    pub fn charge(&mut self, cost: u64) {
        self.cost = self.cost.saturating_add(cost);
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        self.turns.change(|lines| lines.take_back(self.client, self.cost));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // A request that is in no line was given a turn, which is dropped with the channel.
        drop(self.turns.change(|lines| lines.leave(self.client, self.ticket)));
    }
}

impl Lines {
    fn line_up(&mut self, client: ClientId, give: oneshot::Sender<FairPermit>) -> Ticket {
        self.tickets += 1;
        let ticket = self.tickets;
        self.waiting += 1;
        let least = self.least;
        self.update(client, |client| {
            client.served = client.served.max(least);
            client.line.insert(ticket, give);
        });
        ticket
    }

    /// Takes a free place for the first client in the order, and returns the channel to its request. `None` if no place
    /// is free, or if no client may have one.
    fn give(&mut self) -> Option<(ClientId, oneshot::Sender<FairPermit>)> {
        let &(_, ticket, client) = self.next.first().filter(|_| self.free > 0)?;
        self.free -= 1;
        self.waiting -= 1;
        let give = self.update(client, |client| {
            client.held += 1;
            client.served = client.served.saturating_add(1);
            client.line.remove(&ticket)
        });
        give.map(|give| (client, give))
    }

    fn take_back(&mut self, client: ClientId, cost: u64) {
        self.free += 1;
        self.update(client, |client| {
            client.held -= 1;
            client.served = client.served.saturating_add(cost);
        });
    }

    fn leave(&mut self, client: ClientId, ticket: Ticket) -> Option<oneshot::Sender<FairPermit>> {
        let is_there = self.clients.get(&client).is_some_and(|client| client.line.contains_key(&ticket));
        if !is_there {
            return None;
        }
        self.waiting -= 1;
        self.update(client, |client| client.line.remove(&ticket))
    }

    /// Changes one client, and keeps the orders consistent.
    fn update<T>(&mut self, id: ClientId, change: impl FnOnce(&mut Client) -> T) -> T {
        let client = self.clients.entry(id).or_default();
        let list = if client.is_present() { &mut self.present } else { &mut self.remembered };
        list.remove(&(client.served, id));
        if let Some(ticket) = client.first(self.most) {
            self.next.remove(&(client.served, ticket, id));
        }
        let result = change(client);
        let list = if client.is_present() { &mut self.present } else { &mut self.remembered };
        list.insert((client.served, id));
        if let Some(ticket) = client.first(self.most) {
            self.next.insert((client.served, ticket, id));
        }
        self.forget();
        result
    }

    /// Forgets absent clients that were served no more than the least served present one. If too many are remembered,
    /// it also forgets the least served of them.
    fn forget(&mut self) {
        let Some(&(least, _)) = self.present.first() else {
            self.clients.clear();
            self.remembered.clear();
            self.least = 0;
            return;
        };
        self.least = least;
        while let Some(&(served, id)) = self.remembered.first()
            && (served <= least || self.remembered.len() > MAX_REMEMBERED)
        {
            self.remembered.pop_first();
            self.clients.remove(&id);
        }
    }
}

impl Client {
    fn is_present(&self) -> bool {
        self.held > 0 || !self.line.is_empty()
    }

    /// The first request in the client's line, if the client may take another place.
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

    /// A request that waits, as a task would.
    struct Waiter {
        client: ClientId,
        turn: Pin<Box<dyn Future<Output = FairPermit>>>,
        bell: Arc<Bell>,
    }

    impl Waiter {
        /// Joins the line.
        fn new(turns: &FairSemaphore, client: ClientId) -> (Self, Poll<FairPermit>) {
            let turns = turns.clone();
            let turn = Box::pin(async move { turns.take(client).await });
            let mut waiter = Self { client, turn, bell: Arc::default() };
            let first = waiter.look();
            (waiter, first)
        }

        fn look(&mut self) -> Poll<FairPermit> {
            let waker = Waker::from(Arc::clone(&self.bell));
            self.turn.as_mut().poll(&mut Context::from_waker(&waker))
        }
    }

    /// A model of the turns, which looks at every waiter each time.
    #[derive(Default)]
    struct Model {
        places: usize,
        most: usize,
        /// The waiters in order of arrival, by number and client.
        line: Vec<(usize, ClientId)>,
        /// The waiters that were given a place, by number and client.
        given: Vec<(usize, ClientId)>,
        served: BTreeMap<ClientId, u64>,
    }

    impl Model {
        fn held(&self, client: ClientId) -> usize {
            self.given.iter().filter(|(_, other)| *other == client).count()
        }

        fn is_present(&self, client: ClientId) -> bool {
            self.held(client) > 0 || self.line.iter().any(|(_, other)| *other == client)
        }

        fn line_up(&mut self, number: usize, client: ClientId) {
            let here = self.served.iter().filter(|(client, _)| self.is_present(**client));
            let least = here.map(|(_, served)| *served).min();
            if least.is_none() {
                self.served.clear();
            }
            let served = self.served.entry(client).or_default();
            *served = (*served).max(least.unwrap_or(0));
            self.line.push((number, client));
            self.give();
        }

        fn give(&mut self) {
            while self.given.len() < self.places {
                let may = |(_, (_, client)): &(usize, &(usize, ClientId))| self.held(*client) < self.most;
                let next = self.line.iter().enumerate().filter(may);
                let Some((at, _)) = next.min_by_key(|(_, (number, client))| (self.served[client], *number))
                else {
                    return;
                };
                let (number, client) = self.line.remove(at);
                *self.served.get_mut(&client).expect("known") += 1;
                self.given.push((number, client));
            }
        }

        fn take_back(&mut self, number: usize, cost: u64) {
            let at = self.given.iter().position(|(other, _)| *other == number).expect("given");
            let (_, client) = self.given.remove(at);
            *self.served.get_mut(&client).expect("known") += cost;
            self.give();
        }
    }

    /// Lets random waiters come, leave and give places back, and compares the turns with the model.
    fn holds_to_the_model(rng: &mut ChaCha8Rng) {
        let (places, most) = (rng.random_range(1..6), rng.random_range(1..4));
        let clients = rng.random_range(1..6);
        let turns = FairSemaphore::new(places, most);
        let mut model = Model { places, most, ..Model::default() };
        // The waiters by number. A waiter that was given a turn and was not polled since is among those that wait.
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
                    let mut turn: FairPermit = holding.remove(&number).expect("held");
                    turn.charge(cost);
                    drop(turn);
                    model.take_back(number, cost);
                }
                7..9 => {
                    // A waiter that was given a turn is polled immediately in some of the cases.
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
                assert_eq!((client.held, client.is_present()), (model.held(*id), model.is_present(*id)));
            }
            assert_eq!(lines.present.len() + lines.remembered.len(), lines.clients.len());
        }
        drop((waiting, holding));
        assert_eq!(turns.count(), 0);
        assert!(turns.0.lock().unwrap().clients.is_empty(), "no client is present or remembered");
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

    /// The clients in the order in which they get their turns. A turn costs what `cost` says.
    fn order(turns: &FairSemaphore, mut line: Vec<Waiter>, cost: impl Fn(ClientId) -> u64) -> Vec<ClientId> {
        let mut order = Vec::new();
        while !line.is_empty() {
            let at = line.iter().position(|waiter| waiter.bell.rang()).expect("a client has a turn");
            let mut waiter = line.remove(at);
            let Poll::Ready(mut turn) = waiter.look() else { panic!("woken for nothing") };
            turn.charge(cost(waiter.client));
            order.push(waiter.client);
        }
        assert_eq!(turns.count(), 0);
        order
    }

    /// Lets client 9 take all places, and these clients wait for them.
    fn line_of(turns: &FairSemaphore, clients: &[ClientId]) -> Vec<Waiter> {
        let (_first, Poll::Ready(taken)) = Waiter::new(turns, 9) else { panic!("a place is free") };
        let line = clients.iter().map(|client| Waiter::new(turns, *client).0).collect();
        drop(taken);
        line
    }

    #[test]
    fn clients_take_turns_and_each_is_served_in_its_order() {
        let turns = FairSemaphore::new(1, 1);
        let line = line_of(&turns, &[1, 1, 1, 1, 2, 2, 3]);
        assert_eq!(order(&turns, line, |_| 0), [1, 2, 3, 1, 2, 1, 1]);
    }

    #[test]
    fn who_had_the_least_is_next() {
        let turns = FairSemaphore::new(1, 1);
        let line = line_of(&turns, &[1, 1, 1, 2, 2, 2, 2, 2, 2]);
        let cost = |client| if client == 1 { 299 } else { 99 };
        assert_eq!(order(&turns, line, cost), [1, 2, 2, 2, 1, 2, 2, 2, 1]);
    }

    #[test]
    fn who_comes_back_has_what_it_owes_and_nothing_for_its_absence() {
        let turns = FairSemaphore::new(1, 1);
        let (_a, Poll::Ready(mut costly)) = Waiter::new(&turns, 1) else { panic!("free") };
        let second = Waiter::new(&turns, 2).0;
        costly.charge(1000);
        drop(costly);
        // Client 2 was given the place, was not polled since, and waits once more. Client 1 is not present meanwhile.
        let mut line =
            vec![second, Waiter::new(&turns, 2).0, Waiter::new(&turns, 1).0, Waiter::new(&turns, 2).0];
        assert_eq!(turns.count(), 4);
        // Client 3, which was never present, does not come before all requests of client 2.
        line.extend((0..2).map(|_| Waiter::new(&turns, 3).0));
        assert_eq!(order(&turns, line, |_| 0), [2, 2, 3, 2, 3, 1]);
        // No client was present in between, so no service is remembered.
        let line = line_of(&turns, &[1, 2]);
        assert_eq!(order(&turns, line, |_| 0), [1, 2]);
    }

    #[test]
    fn a_client_that_waits_for_its_own_places_keeps_nobody_waiting() {
        let turns = FairSemaphore::new(4, 2);
        let mut mine: Vec<_> = (0..5).map(|_| Waiter::new(&turns, 1)).collect();
        assert_eq!(mine.iter().filter(|(_, turn)| turn.is_ready()).count(), 2);
        let (_other, turn) = Waiter::new(&turns, 2);
        assert!(turn.is_ready());
        // The next request in the client's line gets a place that the client has freed.
        drop(mine.remove(0));
        let next = mine[1].0.look();
        assert!(next.is_ready() && mine[2].0.look().is_pending());
    }

    #[test]
    fn so_many_are_remembered_and_no_more() {
        let turns = FairSemaphore::new(2, 2);
        let (_here, here) = Waiter::new(&turns, 0);
        for client in 1..3000 {
            let (_waiter, Poll::Ready(mut turn)) = Waiter::new(&turns, client) else { panic!("free") };
            turn.charge(client);
        }
        let lines = turns.0.lock().unwrap();
        assert_eq!((lines.clients.len(), lines.remembered.len()), (MAX_REMEMBERED + 1, MAX_REMEMBERED));
        assert!(lines.clients.contains_key(&2999), "who served the most");
        drop(lines);
        drop(here);
        assert!(turns.0.lock().unwrap().clients.is_empty());
    }

    #[test]
    fn threads_that_come_and_leave_at_once_lose_no_place() {
        let turns = FairSemaphore::new(3, 2);
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

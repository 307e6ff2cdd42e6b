//! `unicorn-lab soak`: sends requests to every route of this project's server for a time, while clients disconnect and
//! the device is lost. It checks that no answer changes, that no request fails, and that nothing leaks.
//!
//! Each request is sent once before any fault, and all later answers to it must be equal to the first one
//! ([`answers`]). A route without a request is an error ([`requests`]). One more client leaves streams before their
//! end, and breaks off request bodies. If the server's process is known, the soak test sends it SIGHUP and watches its
//! resources ([`process`]). If the file of its fault layer is known, the device is lost about once a minute
//! ([`faults`]).
//!
//! The server's resources are compared between two moments: after the warm-up, and at the end. At both moments the
//! server is idle and has just done the same work in the same order: a loss, if there are losses, and one round of all
//! clients. So a difference is a leak.
//!
//! Everything is bounded: requests have the client's timeout, waits have timeouts too, only the first
//! [`SHOWN_FAILURES`] failures are kept, and a soak test ends after [`MAX_FAILURES`] failures.

mod answers;
mod client;
mod faults;
mod process;
mod requests;

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::http::Method;

use self::client::{Exchanged, exchange, leave_amid_body, leave_midway};
use self::faults::{Armed, Faults};
use self::process::Held;
use self::requests::{Ask, Compare, ID};
use super::args::{self, SoakLength};
use crate::cli::bench::client::{Client, shown};
use crate::cli::bench::serve;
use crate::cli::error::Error;
use crate::cli::log;
use crate::cli::terminal::print;

/// Maximum number of failures that the report shows, and the number of failures that ends a soak test.
const SHOWN_FAILURES: usize = 10;
const MAX_FAILURES: u64 = 100;
/// The shortest and the longest warm-up. It takes a tenth of the soak test's time.
const WARM_UP: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(180));
/// Number of rounds after the warm-up if memory is judged. On a busy machine, the warm-up alone may be too little work
/// to reach the server's highest memory use.
const WARM_UP_ROUNDS: u32 = 4;
/// Intervals of status requests, of progress lines, and of SIGHUPs.
const LOOK: Duration = Duration::from_millis(250);
const PROGRESS: Duration = Duration::from_secs(30);
const HANG_UP: Duration = Duration::from_secs(45);
/// Interval between two clients that disconnect.
const LEAVE: Duration = Duration::from_millis(150);
/// Longest time until an armed fault has occurred and is over, and until a server without requests is idle.
const FAULT: Duration = Duration::from_secs(180);
const IDLE: Duration = Duration::from_secs(60);
/// No fault is armed in this last part of a soak test.
const LAST_FAULT: Duration = Duration::from_secs(30);
/// Allowed growth of resident memory in percent, and the shortest soak test that checks it.
const MAX_GROWTH: f64 = 2.0;
const SHORTEST_JUDGED: Duration = Duration::from_secs(600);
/// How long the server is idle before memory and threads are judged. Its runtime keeps a thread without work for 10 s.
const REST: Duration = Duration::from_secs(12);

pub fn soak(args: &args::Soak) -> Result<(), Error> {
    let &args::Soak { length, concurrency: clients, .. } = args;
    if let Some(pid) = args.pid
        && Held::of(pid).is_none()
    {
        let problem =
            "/proc shows no process of this user with that number; expected that of `unicorn serve`";
        return Err(Error::Argument(format!("--pid {pid}: {problem}")));
    }
    let client = serve::client(&args.server, 0.0, false)?;
    let model = serve::model(&client, &args.server)?;
    let mut soak = Soak::new(client, &model, args, length);
    soak.check_routes()?;
    soak.record()?;

    let timed = matches!(length, SoakLength::Time(_));
    if let SoakLength::Time(time) = length {
        let warm_up = SoakLength::Time((time / 10).clamp(WARM_UP.0, WARM_UP.1));
        soak.ask_all(clients, warm_up, Meanwhile { disturbed: true, faults: true })?;
        if soak.is_judged {
            let rounds = SoakLength::Rounds(WARM_UP_ROUNDS);
            soak.ask_all(clients, rounds, Meanwhile { disturbed: true, faults: false })?;
        }
    }
    let before = soak.after_a_round(clients, timed)?;
    soak.ask_all(clients, length, Meanwhile { disturbed: true, faults: true })?;
    let aged = soak.measure();
    let after = soak.after_a_round(clients, timed)?;
    soak.report(args, length, clients, [&before, &aged, &after])
}

/// What happens while the clients send requests.
#[derive(Clone, Copy)]
struct Meanwhile {
    /// Whether clients disconnect and SIGHUPs are sent.
    disturbed: bool,
    faults: bool,
}

/// The resources of an idle server.
struct Measured {
    /// The body of `/status`, or the reason why the server is not idle.
    idle: Result<Value, String>,
    server: Option<Held>,
    /// The number and the resources of the device process.
    device: Option<(u32, Held)>,
}

struct Soak {
    client: Client,
    pid: Option<u32>,
    faults: Option<Faults>,
    /// Whether the soak test is long enough to distinguish a leak from noise.
    is_judged: bool,
    chains: Vec<Vec<Ask>>,
    /// The first answer to each request.
    expected: Vec<Vec<Value>>,
    began: Instant,
    counts: Counts,
    /// The first failures, one line each.
    failures: Mutex<Vec<String>>,
    /// Odd while a fault is armed, or while the server recovers from it.
    trouble: AtomicU64,
    /// The highest resident memory of the server and of its device process, and the most descriptors of both.
    most: [u64; 4],
}

#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    failures: AtomicU64,
    left: AtomicU64,
    broken_off: AtomicU64,
    hang_ups: AtomicU64,
}

/// A check of the report: its name, its result, and whether it passed. A figure without a limit always passes.
struct Check {
    what: &'static str,
    said: String,
    holds: bool,
}

impl Soak {
    fn new(client: Client, model: &str, args: &args::Soak, length: SoakLength) -> Self {
        Self {
            client,
            pid: args.pid,
            faults: args.fault_file.as_deref().map(Faults::new),
            is_judged: matches!(length, SoakLength::Time(time) if time >= SHORTEST_JUDGED),
            chains: requests::chains(model),
            expected: Vec::new(),
            began: Instant::now(),
            counts: Counts::default(),
            failures: Mutex::default(),
            trouble: AtomicU64::new(0),
            most: [0; 4],
        }
    }

    fn error(&self, problem: String) -> Error {
        Error::Tool { tool: self.client.url().to_owned(), problem }
    }

    /// Refuses a server that has a route without a request.
    fn check_routes(&self) -> Result<(), Error> {
        let document = exchange(&self.client, &Method::GET, "/openapi.json", None);
        let document = document.map_err(|error| self.error(error.to_string()))?;
        let parsed: Value = serde_json::from_slice(&document.body).unwrap_or_default();
        if document.status != 200 || !parsed["paths"].is_object() {
            let problem =
                "/openapi.json is no description of its routes; a soak is for `unicorn serve` alone";
            return Err(self.error(problem.into()));
        }
        let missing = requests::missing(&parsed, &self.chains);
        if !missing.is_empty() {
            let problem = "a soak has no request for";
            let remedy = "add one to src/lab/soak/requests.rs";
            return Err(self.error(format!("{problem} {}; {remedy}", missing.join(", "))));
        }
        Ok(())
    }

    /// Sends all requests once, one after the other, and keeps the answers. Each must have the expected status.
    fn record(&mut self) -> Result<(), Error> {
        let mut wrong = Vec::new();
        for chain in &self.chains {
            let (mut id, mut answers) = (None, Vec::new());
            for ask in chain {
                let answer = self.send(ask, &mut id).and_then(|got| match ask.allows(got.status) {
                    true => answers::comparable(&got),
                    false => Err(other_status(ask, &got)),
                });
                answers.push(answer.unwrap_or_else(|why| {
                    wrong.push(format!("{} {} ({}): {why}", ask.method, ask.path, ask.name));
                    Value::Null
                }));
            }
            self.expected.push(answers);
        }
        match wrong.len() {
            0 => Ok(()),
            n => {
                wrong.truncate(SHOWN_FAILURES);
                let problem = format!("{n} requests have another answer than a soak expects of this server");
                Err(self.error(format!("{problem}: {}", wrong.join("; "))))
            }
        }
    }

    /// Sends a request, with the chain's id instead of [`ID`].
    fn send(&self, ask: &Ask, id: &mut Option<String>) -> Result<Exchanged, String> {
        self.counts.requests.fetch_add(1, Relaxed);
        let with_id = |text: &str| text.replace(ID, id.as_deref().unwrap_or_default());
        let body = ask.body.as_deref().map(with_id);
        let got = exchange(&self.client, &ask.method, &with_id(&ask.path), body.as_deref());
        let got = got.map_err(|error| error.to_string())?;
        if ask.gives_id {
            let body: Value = serde_json::from_slice(&got.body).unwrap_or_default();
            let given = body["id"].as_str().ok_or_else(|| format!("status {} without an id", got.status))?;
            *id = Some(given.to_owned());
        }
        Ok(got)
    }

    /// Sends a chain, and compares each answer with the first one.
    fn ask(&self, chain: usize) {
        let mut id = None;
        for (ask, expected) in self.chains[chain].iter().zip(&self.expected[chain]) {
            let before = self.trouble.load(Relaxed);
            let sent = self.began.elapsed();
            let compared = self.send(ask, &mut id).and_then(|got| {
                let calm = before.is_multiple_of(2) && before == self.trouble.load(Relaxed);
                compare(ask, expected, &got, calm)
            });
            if let Err(why) = compared {
                self.fail(
                    &format!("{} {} ({}, sent at {} s)", ask.method, ask.path, ask.name, sent.as_secs()),
                    &why,
                );
                return;
            }
        }
    }

    fn fail(&self, who: &str, why: &str) {
        self.counts.failures.fetch_add(1, Relaxed);
        let mut failures = self.failures.lock().expect("nothing panics under this lock");
        if failures.len() < SHOWN_FAILURES {
            failures.push(format!("{who}: {why}"));
        }
    }

    fn has_given_up(&self) -> bool {
        self.counts.failures.load(Relaxed) >= MAX_FAILURES
    }

    /// Runs all clients, each of which begins at another place in the list. Returns when they have stopped and no fault
    /// is in progress.
    fn ask_all(&mut self, clients: u32, length: SoakLength, meanwhile: Meanwhile) -> Result<(), Error> {
        let (over, busy) = (AtomicBool::new(false), AtomicUsize::new(clients as usize));
        let mut faults = self.faults.take();
        let mut most = self.most;
        let outcome = thread::scope(|scope| {
            let watched = Watch { soak: self, length, meanwhile, began: Instant::now() };
            // The first fault is armed before the first request, so that it occurs even in a single round.
            let armed = watched.arm_first(faults.as_mut())?;
            let (soak, over, busy) = (&*self, &over, &busy);
            let mut spawned = Ok(());
            for n in 0..clients {
                let first = n as usize * soak.chains.len() / clients as usize;
                let ask = move || soak.ask_rounds(first, length, over, busy);
                spawned = spawned.and(thread::Builder::new().spawn_scoped(scope, ask).map(|_| ()));
            }
            if meanwhile.disturbed {
                let leave = move || soak.leave(over, busy);
                spawned = spawned.and(thread::Builder::new().spawn_scoped(scope, leave).map(|_| ()));
            }
            if let Err(error) = spawned {
                over.store(true, Relaxed);
                return Err(Error::Runtime(error));
            }
            watched.until_done(over, busy, faults.as_mut(), armed, &mut most)
        });
        (self.faults, self.most) = (faults, most);
        outcome
    }

    /// Sends all requests, beginning with the chain `first`, until the time or the rounds are over.
    fn ask_rounds(&self, first: usize, length: SoakLength, over: &AtomicBool, busy: &AtomicUsize) {
        let _leaves = Leaves(busy);
        let more = |round: u32| match length {
            SoakLength::Time(_) => true,
            SoakLength::Rounds(rounds) => round < rounds || self.trouble.load(Relaxed) % 2 == 1,
        };
        let mut round = 0;
        while more(round) {
            for chain in 0..self.chains.len() {
                if over.load(Relaxed) || self.has_given_up() {
                    return;
                }
                self.ask((first + chain) % self.chains.len());
            }
            round += 1;
        }
    }

    /// Leaves streams and breaks off bodies while other clients run.
    fn leave(&self, over: &AtomicBool, busy: &AtomicUsize) {
        loop {
            for (path, body) in requests::left_midway() {
                let body = body.to_string();
                match leave_midway(&self.client, path, &body) {
                    Ok(()) => drop(self.counts.left.fetch_add(1, Relaxed)),
                    Err(error) => self.fail(&format!("POST {path} (left midway)"), &error.to_string()),
                }
                thread::sleep(LEAVE);
                leave_amid_body(&self.client, path, &body);
                self.counts.broken_off.fetch_add(1, Relaxed);
                thread::sleep(LEAVE);
                if self.has_given_up() {
                    return;
                }
            }
            if over.load(Relaxed) || busy.load(Relaxed) == 0 {
                return;
            }
        }
    }

    fn status(&self) -> Option<Value> {
        let status = exchange(&self.client, &Method::GET, "/status", None).ok()?;
        serde_json::from_slice(&status.body).ok()
    }

    /// Runs one round of all clients, after a device loss if faults are possible, and measures the server.
    fn after_a_round(&mut self, clients: u32, may_lose: bool) -> Result<Measured, Error> {
        if may_lose && let Some(faults) = &self.faults {
            thread::sleep(faults.wait());
        }
        self.ask_all(clients, SoakLength::Rounds(1), Meanwhile { disturbed: false, faults: may_lose })?;
        Ok(self.measure())
    }

    /// Waits until the server is idle, and returns its resources.
    fn measure(&self) -> Measured {
        let since = Instant::now();
        let idle = loop {
            let status = self.status();
            let idle = status.as_ref().map_or(Err("it does not answer".into()), idle);
            let idle = idle.and_then(|()| self.has_one_child());
            match (idle, status) {
                (Ok(()), Some(status)) => break Ok(status),
                (Err(why), _) if since.elapsed() > IDLE => {
                    break Err(format!("after {} s without a request {why}", IDLE.as_secs()));
                }
                _ => thread::sleep(LOOK),
            }
        };
        if self.is_judged {
            thread::sleep(REST);
        }
        let server = self.pid.and_then(Held::settled);
        let device = self.pid.and_then(process::device_process);
        let device = device.and_then(|pid| Some((pid, Held::settled(pid)?)));
        Measured { idle, server, device }
    }

    /// Whether all device processes of earlier losses have ended.
    fn has_one_child(&self) -> Result<(), String> {
        match self.pid.map_or(0, |server| process::children(server).len()) {
            0 | 1 => Ok(()),
            n => Err(format!("it has {n} children instead of one process that has the device")),
        }
    }

    fn report(
        &self,
        args: &args::Soak,
        length: SoakLength,
        clients: u32,
        [before, aged, after]: [&Measured; 3],
    ) -> Result<(), Error> {
        let count = |count: &AtomicU64| count.load(Relaxed);
        let Counts { requests, failures, left, broken_off, hang_ups } = &self.counts;
        let (requests, failed) = (count(requests), count(failures));
        let mut checks = vec![Check {
            what: "answers",
            said: format!(
                "{requests} requests, {failed} failed or differed; {} streams left midway, {} bodies broken off, {} SIGHUPs",
                count(left),
                count(broken_off),
                count(hang_ups)
            ),
            holds: failed == 0,
        }];
        checks.push(self.losses(after));
        checks.extend([("idle after the soak", aged), ("idle at the end", after)].map(|(what, measured)| {
            let said = match &measured.idle {
                Ok(_) => {
                    "nothing runs, waits or arrives, no block is held, and no process is left over".into()
                }
                Err(why) => why.clone(),
            };
            Check { what, said, holds: measured.idle.is_ok() }
        }));
        checks.push(blocks(before, after));
        if self.pid.is_some() {
            checks.extend(self.held(before, aged, after));
        }

        let shown = self.failures.lock().expect("nothing panics under this lock");
        let wrong = checks.iter().filter(|check| !check.holds).count();
        if args.json {
            let checks: Vec<Value> = checks
                .iter()
                .map(|check| json!({"check": check.what, "holds": check.holds, "said": check.said}))
                .collect();
            let report = json!({
                "url": self.client.url(),
                "soak": length.to_string(),
                "clients": clients,
                "seconds": self.began.elapsed().as_secs_f64(),
                "checks": checks,
                "failures": *shown,
            });
            print(&format!("{report}\n"))?;
        } else {
            let mut text = format!(
                "a soak of {length}, {clients} clients, {} requests in a round, at {}; {} s in all\n",
                self.chains.iter().map(Vec::len).sum::<usize>(),
                self.client.url(),
                self.began.elapsed().as_secs()
            );
            for Check { what, said, holds } in &checks {
                let _ = writeln!(text, "{} {what}: {said}", if *holds { "ok    " } else { "FAILED" });
            }
            for failure in shown.iter() {
                let _ = writeln!(text, "  {failure}");
            }
            print(&text)?;
        }
        if wrong == 0 {
            Ok(())
        } else {
            Err(self.error(format!("{wrong} of {} checks failed", checks.len())))
        }
    }

    fn losses(&self, after: &Measured) -> Check {
        let injected = self.faults.as_ref().map_or(0, |faults| faults.losses);
        let armed = self.faults.as_ref().map_or(0, |faults| faults.armed);
        let engine = after.idle.as_ref().ok().map(|status| &status["engine"]);
        let counted = engine.and_then(|engine| engine["device_losses"].as_u64());
        let took = engine.and_then(|engine| engine["recovery_s"].as_f64()).unwrap_or_default();
        let said = match counted {
            None => "the server says nothing of them".into(),
            Some(0) => format!("{armed} faults, none of which lost the device; the server counts none"),
            Some(counted) => format!(
                "{armed} faults, {injected} of which lost the device; the server counts {counted}, {:.1} s each until \
                 it computed again",
                took / counted as f64
            ),
        };
        Check { what: "losses", said, holds: counted == Some(injected) }
    }

    /// Checks of the resources of the processes, before and after.
    fn held(&self, before: &Measured, aged: &Measured, after: &Measured) -> Vec<Check> {
        let mib = |kib: u64| kib as f64 / 1024.0;
        let [most_server, most_device, files_server, files_device] = self.most;
        let mut checks = Vec::new();
        let mut compare = |what: [&'static str; 3],
                           one: Option<Held>,
                           other: Option<Held>,
                           most: [u64; 2]| {
            let (Some(one), Some(other)) = (one, other) else {
                checks.push(Check { what: what[0], said: "there is no such process".into(), holds: false });
                return;
            };
            checks.push(Check {
                what: what[0],
                said: format!(
                    "{} before, {} at the end, {} at most",
                    one.descriptors, other.descriptors, most[0]
                ),
                holds: one.descriptors == other.descriptors,
            });
            checks.push(Check {
                what: what[1],
                said: format!("{} before, {} at the end", one.threads, other.threads),
                holds: !self.is_judged || other.threads <= one.threads,
            });
            let growth = (other.resident_kib as f64 / one.resident_kib as f64 - 1.0) * 100.0;
            let verdict = match self.is_judged {
                true => format!("less than {MAX_GROWTH} % allowed"),
                false => format!("not judged in less than {} minutes", SHORTEST_JUDGED.as_secs() / 60),
            };
            checks.push(Check {
                what: what[2],
                said: format!(
                    "{:.1} MiB before, {:.1} at the end ({growth:+.2} %, {verdict}), {:.1} at most; anonymous {:.1} and {:.1}",
                    mib(one.resident_kib),
                    mib(other.resident_kib),
                    mib(most[1]),
                    mib(one.anonymous_kib),
                    mib(other.anonymous_kib)
                ),
                holds: !self.is_judged || growth < MAX_GROWTH,
            });
        };
        let names = ["descriptors of the server", "threads of the server", "memory of the server"];
        compare(names, before.server, after.server, [files_server, most_server]);
        let names = [
            "descriptors of the device process",
            "threads of the device process",
            "memory of the device process",
        ];
        let (one, other) = (before.device.map(|(_, held)| held), after.device.map(|(_, held)| held));
        compare(names, one, other, [files_device, most_device]);
        if let (Some((old, aged)), Some((new, fresh))) = (aged.device, after.device) {
            let process = if old == new { "the same process" } else { "another process" };
            checks.push(Check {
                what: "memory of the device process at the soak's end",
                said: format!(
                    "{:.1} MiB; {process} has {:.1} MiB at the end",
                    mib(aged.resident_kib),
                    mib(fresh.resident_kib)
                ),
                holds: true,
            });
        }
        checks
    }
}

/// Counts a client as ended when it is dropped.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Watches the server while clients send requests.
struct Watch<'a> {
    soak: &'a Soak,
    length: SoakLength,
    meanwhile: Meanwhile,
    began: Instant,
}

impl Watch<'_> {
    fn arm(&self, faults: &mut Faults) -> Result<(Armed, u64), Error> {
        let losses = |status: Value| status["engine"]["device_losses"].as_u64();
        let before = self.soak.status().and_then(losses).unwrap_or_default();
        self.soak.trouble.fetch_add(1, Relaxed);
        // Both measurements come after a loss, or neither does.
        let armed = faults.arm(!self.meanwhile.disturbed);
        Ok((
            armed.map_err(|error| self.soak.error(format!("--fault-file cannot be written: {error}")))?,
            before,
        ))
    }

    fn arm_first(&self, faults: Option<&mut Faults>) -> Result<Option<(Armed, u64)>, Error> {
        let due = faults.filter(|faults| self.meanwhile.faults && faults.is_due());
        due.map(|faults| self.arm(faults)).transpose()
    }

    /// Whether a fault is over: it has occurred, and the device computes again.
    fn is_over(&self, faults: &Faults, (armed, losses_before): &(Armed, u64)) -> bool {
        if !armed.loses {
            return faults.has_struck(armed);
        }
        let Some(status) = self.soak.status() else { return false };
        let lost = status["engine"]["device_losses"].as_u64().is_some_and(|losses| losses > *losses_before);
        let health = exchange(&self.soak.client, &Method::GET, "/health", None);
        lost && health.is_ok_and(|health| health.status == 200)
    }

    fn until_done(
        &self,
        over: &AtomicBool,
        busy: &AtomicUsize,
        mut faults: Option<&mut Faults>,
        mut armed: Option<(Armed, u64)>,
        most: &mut [u64; 4],
    ) -> Result<(), Error> {
        let (mut told, mut hung_up) = (Instant::now(), Instant::now());
        let left = || match self.length {
            SoakLength::Time(time) => Some(time.saturating_sub(self.began.elapsed())),
            SoakLength::Rounds(_) => None,
        };
        while busy.load(Relaxed) > 0 {
            thread::sleep(LOOK);
            let resident = self.look(most);
            if self.meanwhile.disturbed && hung_up.elapsed() >= HANG_UP {
                hung_up = Instant::now();
                self.hang_up();
            }
            if let Some(faults) = faults.as_deref_mut() {
                if let Some(fault) = &armed
                    && (self.is_over(faults, fault)
                        || fault.0.since.elapsed() > FAULT
                        || self.soak.has_given_up())
                {
                    if fault.0.since.elapsed() > FAULT {
                        let why = format!("it is not over after {} s", FAULT.as_secs());
                        self.soak.fail(&format!("fault {}", fault.0.text), &why);
                    }
                    armed = None;
                    faults.over();
                    self.soak.trouble.fetch_add(1, Relaxed);
                }
                let is_time = left().is_some_and(|left| left > LAST_FAULT);
                if armed.is_none() && self.meanwhile.faults && is_time && faults.is_due() {
                    armed = match self.arm(faults) {
                        Ok(armed) => Some(armed),
                        Err(error) => {
                            over.store(true, Relaxed);
                            return Err(error);
                        }
                    };
                }
            }
            if armed.is_none() && left().is_some_and(|left| left.is_zero()) {
                over.store(true, Relaxed);
            }
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                let count = |count: &AtomicU64| count.load(Relaxed);
                let Counts { requests, failures, .. } = &self.soak.counts;
                let faults = faults.as_deref().map_or((0, 0), |faults| (faults.armed, faults.losses));
                log::say(format_args!(
                    "{:5} s: {} requests, {} faults, {} losses, {} failures{resident}",
                    self.soak.began.elapsed().as_secs(),
                    count(requests),
                    faults.0,
                    faults.1,
                    count(failures)
                ));
            }
        }
        Ok(())
    }

    /// Updates the highest figures, and returns the resident memory.
    fn look(&self, most: &mut [u64; 4]) -> String {
        let Some(server) = self.soak.pid else { return String::new() };
        let held = Held::of(server);
        let device = process::device_process(server).and_then(Held::of);
        let figures = [
            held.map(|held| held.resident_kib),
            device.map(|held| held.resident_kib),
            held.map(|held| held.descriptors),
            device.map(|held| held.descriptors),
        ];
        for (most, now) in most.iter_mut().zip(figures) {
            *most = now.unwrap_or(0).max(*most);
        }
        let mib =
            |figure: Option<u64>| figure.map_or("-".into(), |kib| format!("{:.1}", kib as f64 / 1024.0));
        format!(", {} and {} MiB resident", mib(figures[0]), mib(figures[1]))
    }

    fn hang_up(&self) {
        let Some(server) = self.soak.pid else { return };
        match process::hang_up(server) {
            Ok(()) => drop(self.soak.counts.hang_ups.fetch_add(1, Relaxed)),
            Err(error) => self.soak.fail("SIGHUP", &error.to_string()),
        }
    }
}

fn other_status(ask: &Ask, got: &Exchanged) -> String {
    format!("expected status {}, got {}: {}", ask.status, got.status, shown(&got.body))
}

/// Whether an answer is the expected one. `calm`: no fault was in progress during the request.
fn compare(ask: &Ask, expected: &Value, got: &Exchanged, calm: bool) -> Result<(), String> {
    let said = || shown(&got.body);
    let refused = || Err(other_status(ask, got));
    match ask.compare {
        Compare::Success if ask.allows(got.status) => Ok(()),
        Compare::Success => refused(),
        Compare::Health => {
            let report: Value = serde_json::from_slice(&got.body).unwrap_or_default();
            match (got.status, report["status"].as_str()) {
                (200, Some("ok")) => Ok(()),
                // A device that hangs does not answer a probe until its loss is noticed.
                (503, Some("recovering" | "unresponsive")) if !calm => Ok(()),
                _ => Err(format!("the server is not well: {}: {}", got.status, said())),
            }
        }
        Compare::Same | Compare::Model if got.status != ask.status => refused(),
        Compare::Same | Compare::Model => {
            let mut answer = answers::comparable(got)?;
            if ask.compare == Compare::Model && !calm {
                answers::count_as_loaded(&mut answer);
            }
            answers::difference(expected, &answer).map_or(Ok(()), Err)
        }
    }
}

/// The part of the status that shows that the server is not idle.
fn idle(status: &Value) -> Result<(), String> {
    // The request for the status is itself open, and has a connection.
    for (pointer, most) in [
        ("/requests/open", 1),
        ("/requests/arriving", 0),
        ("/requests/waiting", 0),
        ("/requests/running", 0),
        ("/kv/full/held", 0),
        ("/kv/sliding/held", 0),
        ("/connections", 1),
    ] {
        match status.pointer(pointer).and_then(Value::as_u64) {
            Some(n) if n <= most => {}
            Some(n) => return Err(format!("{pointer} of its status is {n}")),
            None => return Err(format!("its status has no {pointer}")),
        }
    }
    Ok(())
}

/// Whether all blocks are free or in the prefix cache.
fn blocks(before: &Measured, after: &Measured) -> Check {
    let pools = |measured: &Measured| -> Option<[[u64; 2]; 2]> {
        let kv = &measured.idle.as_ref().ok()?["kv"];
        let pool = |name: &str| Some([kv[name]["cached"].as_u64()?, kv[name]["free"].as_u64()?]);
        Some([pool("full")?, pool("sliding")?])
    };
    let all = |pools: [[u64; 2]; 2]| pools.map(|[cached, free]| cached + free);
    let (said, holds) = match (pools(before), pools(after)) {
        (Some(one), Some(other)) => {
            let [[full, _], [sliding, _]] = other;
            let [all_full, all_sliding] = all(other);
            (
                format!(
                    "{full} of {all_full} full ones and {sliding} of {all_sliding} sliding ones are cached, all others free"
                ),
                all(one) == all(other),
            )
        }
        _ => ("the server says nothing of them".into(), false),
    };
    Check { what: "blocks", said, holds }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Value {
        let pool = json!({"held": 0, "cached": 3, "free": 7});
        let requests = json!({"open": 1, "arriving": 0, "waiting": 0, "running": 0});
        json!({"connections": 1, "requests": requests, "kv": {"full": pool, "sliding": pool}, "engine": {}})
    }

    fn measured(status: Value) -> Measured {
        Measured { idle: Ok(status), server: None, device: None }
    }

    #[test]
    fn a_server_is_idle_when_nothing_is_left_of_any_request() {
        assert_eq!(idle(&status()), Ok(()));
        for (pointer, n) in [("/requests/running", 1), ("/kv/full/held", 1), ("/connections", 2)] {
            let mut busy = status();
            *busy.pointer_mut(pointer).expect("there") = json!(n);
            assert_eq!(idle(&busy), Err(format!("{pointer} of its status is {n}")));
        }
        assert!(idle(&json!({})).is_err());
    }

    #[test]
    fn a_block_that_is_neither_free_nor_cached_is_missed() {
        let mut other = status();
        other["kv"]["full"] = json!({"held": 0, "cached": 9, "free": 1});
        assert!(blocks(&measured(status()), &measured(other.clone())).holds);
        other["kv"]["sliding"]["free"] = json!(6);
        assert!(!blocks(&measured(status()), &measured(other)).holds);
    }

    #[test]
    fn a_server_may_be_unwell_only_while_there_is_a_reason() {
        let chains = requests::chains("a/b");
        let health =
            chains.iter().flatten().find(|ask| ask.compare == Compare::Health).expect("there is one");
        let report = |status: u16, name: &str| Exchanged {
            status,
            kind: "application/json".into(),
            body: json!({"status": name}).to_string().into(),
        };
        let well = |got: &Exchanged, calm| compare(health, &Value::Null, got, calm).is_ok();
        assert!(well(&report(200, "ok"), true) && well(&report(503, "recovering"), false));
        assert!(!well(&report(503, "recovering"), true) && !well(&report(503, "lost"), false));

        let models = chains.iter().flatten().find(|ask| ask.compare == Compare::Model).expect("there is one");
        let model = |state: &str| Exchanged {
            status: 200,
            kind: "application/json".into(),
            body: json!({"data": [{"id": "a/b", "status": {"value": state}}]}).to_string().into(),
        };
        let loaded = answers::comparable(&model("loaded")).expect("JSON");
        let listed = |state, calm| compare(models, &loaded, &model(state), calm).is_ok();
        assert!(listed("loaded", true) && listed("loading", false));
        assert!(!listed("loading", true) && !listed("unloaded", false));
    }

    #[test]
    fn another_answer_or_another_status_is_a_failure() {
        let ask = &requests::chains("a/b")[0][0];
        let answer = |status, text: &str| Exchanged {
            status,
            kind: "application/json".into(),
            body: json!({"id": "chatcmpl-0123456789", "text": text}).to_string().into(),
        };
        let expected = answers::comparable(&answer(200, "yes")).expect("JSON");
        assert_eq!(compare(ask, &expected, &answer(200, "yes"), false), Ok(()));
        let other = compare(ask, &expected, &answer(200, "no"), false);
        assert_eq!(other, Err(".text was \"yes\", and is \"no\"".into()));
        assert!(compare(ask, &expected, &answer(503, "yes"), false).is_err());
    }
}

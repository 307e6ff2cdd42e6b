//! `unicorn bench serve`: sends requests to a server over HTTP as clients would, and reports the waiting times.
//!
//! All loops are closed: a stream sends its next request after the answer to the last one, so the number of requests in
//! progress is the requested one. Only the long prompts of `mixed` arrive by the clock. A failed request is counted and
//! reported, and not repeated. If all requests fail, the benchmark fails. The report does not name the server's device,
//! which must be noted separately.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Answer, AskError, Client, Options};
use super::prompts::Prompts;
use super::statistics::{Times, column, median, ratio};
use crate::cli::args::{BenchServe, Scenario, ServerOptions};
use crate::cli::error::Error;
use crate::cli::progress::{Bar, Spinner};
use crate::cli::terminal::print;
use crate::hub::tls;
use crate::session::random_u64;

const CONCURRENCY: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
const PROMPT_TOKENS: u32 = 128;
const CHATS: u32 = 16;
const LONG_TOKENS: u32 = 4000;
const LONG_REQUESTS: u32 = 4;
const HISTORY_TOKENS: u32 = 2000;
/// Rate of the long prompts, as a fraction of the rate that the server can process.
const LONG_LOAD: f64 = 0.5;
const SECOND_QUESTION: &str = "And how does it end?";

pub fn serve(args: &BenchServe) -> Result<(), Error> {
    refuse_foreign_options(args)?;
    let generator = Generator::start(args)?;
    match args.scenario {
        Scenario::Closed => closed(&generator, args),
        Scenario::Mixed => mixed(&generator, args),
        Scenario::SecondTurn => second_turn(&generator, args),
    }
}

/// Refuses options that have no effect in the scenario.
fn refuse_foreign_options(args: &BenchServe) -> Result<(), Error> {
    use Scenario::{Closed, Mixed, SecondTurn};
    let of: [(&str, bool, &[Scenario]); 6] = [
        ("--prompt-tokens", args.prompt_tokens.is_some(), &[Closed, Mixed]),
        ("--concurrency", args.concurrency.is_some(), &[Closed]),
        ("--chats", args.chats.is_some(), &[Mixed]),
        ("--long-tokens", args.long_tokens.is_some(), &[Mixed]),
        ("--long-requests", args.long_requests.is_some(), &[Mixed]),
        ("--history-tokens", args.history_tokens.is_some(), &[SecondTurn]),
    ];
    match of.iter().find(|(_, given, scenarios)| *given && !scenarios.contains(&args.scenario)) {
        None => Ok(()),
        Some((option, _, scenarios)) => {
            let names: Vec<_> = scenarios.iter().map(Scenario::to_string).collect();
            Err(Error::Argument(format!("{option} belongs to --scenario {}", names.join(" or "))))
        }
    }
}

/// Sends prompts that no server has seen.
struct Generator {
    client: Client,
    model: String,
    prompts: Prompts,
    prompt_tokens: u32,
    max_tokens: u32,
    requests: u32,
}

impl Generator {
    /// Finds the model. One request warms the server up, and shows how many tokens it makes of a text.
    fn start(args: &BenchServe) -> Result<Self, Error> {
        let client = client(&args.server, args.temperature, args.ignore_eos)?;
        let _spinner = Spinner::start(format!("warming up {}", client.url()));
        let model = model(&client, &args.server)?;
        let mut generator = Self {
            client,
            model,
            prompts: Prompts::new(args.seed.unwrap_or_else(random_u64)),
            prompt_tokens: args.prompt_tokens.unwrap_or(PROMPT_TOKENS),
            max_tokens: args.max_tokens,
            requests: args.requests,
        };
        generator.warm_up()?;
        Ok(generator)
    }

    fn warm_up(&mut self) -> Result<(), Error> {
        let words = self.prompts.words(self.prompt_tokens) as f64;
        let answer = match self.ask(self.prompt_tokens, self.max_tokens) {
            // The server may refuse the request for usage. Otherwise it repeats its answer.
            Err(AskError::Status { status: 400 | 422, .. }) => {
                self.client.include_usage = false;
                self.ask(self.prompt_tokens, self.max_tokens)
            }
            answer => answer,
        };
        let answer = answer.map_err(|error| self.error(&error))?;
        if let Some(usage) = answer.usage.filter(|usage| usage.prompt_tokens > 0) {
            self.prompts.words_per_token = words / usage.prompt_tokens as f64;
        }
        Ok(())
    }

    fn ask(&self, prompt_tokens: u32, max_tokens: u32) -> Result<Answer, AskError> {
        let question = json!([{"role": "user", "content": self.prompts.question(prompt_tokens)}]);
        self.client.ask(&self.model, &question, max_tokens)
    }

    /// Runs `streams` streams, each of which sends its next request when the last is done. A stream ends once it has
    /// sent its requests and `more` is false; after its own requests, its first failure ends it too.
    fn closed_loop(
        &self,
        what: String,
        streams: u32,
        more: &(dyn Fn() -> bool + Sync),
    ) -> Result<Tally, Error> {
        let bar = Bar::of("requests", what, u64::from(streams) * u64::from(self.requests));
        let stop = AtomicBool::new(false);
        let stream = |results: mpsc::SyncSender<Result<Answer, AskError>>| {
            let (mut sent, mut well) = (0, true);
            while !stop.load(Ordering::Relaxed) && (sent < self.requests || well && more()) {
                let result = self.ask(self.prompt_tokens, self.max_tokens);
                (sent, well) = (sent + 1, result.is_ok());
                if results.send(result).is_err() {
                    return;
                }
            }
        };
        let mut tally = Tally::default();
        let since = Instant::now();
        thread::scope(|scope| {
            let (send, results) = mpsc::sync_channel(streams as usize);
            for _ in 0..streams {
                let send = send.clone();
                let spawned = thread::Builder::new().spawn_scoped(scope, || stream(send));
                if let Err(error) = spawned {
                    stop.store(true, Ordering::Relaxed);
                    return Err(Error::Runtime(error));
                }
            }
            drop(send);
            for result in results {
                tally.add(result);
                bar.set(tally.requests.min(u64::from(streams) * u64::from(self.requests)));
            }
            Ok(())
        })?;
        tally.time = since.elapsed();
        Ok(tally)
    }

    fn error(&self, error: &AskError) -> Error {
        Error::Tool { tool: self.client.url().to_owned(), problem: error.to_string() }
    }

    /// Fails if no request of any tally succeeded.
    fn check_any<'a>(&self, tallies: impl IntoIterator<Item = &'a Tally>) -> Result<(), Error> {
        let mut failure = None;
        for tally in tallies {
            if tally.requests > tally.failures {
                return Ok(());
            }
            failure = failure.or(tally.first_failure.as_ref());
        }
        failure.map_or(Ok(()), |failure| {
            let problem = format!("no request was answered: {failure}");
            Err(Error::Tool { tool: self.client.url().to_owned(), problem })
        })
    }

    /// The first fields of every report.
    fn json(&self, scenario: Scenario, counted_by: &str) -> Value {
        json!({
            "url": self.client.url(),
            "model": self.model,
            "scenario": scenario.to_string(),
            "seed": self.prompts.seed(),
            "requests_per_stream": self.requests,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.client.ignores_eos(),
            "tokens_counted_by": counted_by,
        })
    }

    /// The length of an answer in tokens, as text.
    fn length(&self) -> String {
        format!("{}{}", if self.client.ignores_eos() { "" } else { "at most " }, self.max_tokens)
    }

    fn heading(&self) -> String {
        format!("{} at {}, seed {}\n", self.model, self.client.url(), self.prompts.seed())
    }
}

/// A client of the server that the arguments name. Nothing is sent yet.
pub fn client(args: &ServerOptions, temperature: f32, ignore_eos: bool) -> Result<Client, Error> {
    let url = args.url.trim_end_matches('/').to_owned();
    let parsed: Option<ureq::http::Uri> = url.parse().ok();
    let sound = |uri: &ureq::http::Uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && uri.query().is_none()
    };
    if !parsed.as_ref().is_some_and(sound) {
        let problem = "is no address; expected one like http://127.0.0.1:8010/v1";
        return Err(Error::Argument(format!("--url {:?} {problem}", args.url)));
    }
    if args.api_key.as_ref().is_some_and(|key| !key.bytes().all(|b| b.is_ascii_graphic())) {
        return Err(Error::Argument("--api-key: a key is letters, digits and signs, without blanks".into()));
    }
    let timeout = Duration::from_secs(args.timeout_s.into());
    let tls = tls(&url, |name| std::env::var_os(name))?;
    let options = Options { url, api_key: args.api_key.clone(), temperature, ignore_eos, timeout, tls };
    Ok(Client::new(options))
}

/// The model that the arguments name, or the only one that the server lists.
pub fn model(client: &Client, args: &ServerOptions) -> Result<String, Error> {
    if let Some(model) = &args.model {
        return Ok(model.clone());
    }
    let error = |problem: String| Error::Tool { tool: client.url().to_owned(), problem };
    let mut ids = client.models().map_err(|problem| match problem {
        AskError::Status { .. } | AskError::Foreign(_) => {
            error(format!("{problem}; name the model with --model"))
        }
        problem => error(problem.to_string()),
    })?;
    match ids.len() {
        0 => Err(error("lists no model; name one with --model".into())),
        1 => Ok(ids.remove(0)),
        _ => Err(error(format!("lists several models, choose one with --model: {}", ids.join(", ")))),
    }
}

/// Counts and times of many requests.
#[derive(Default)]
struct Tally {
    requests: u64,
    failures: u64,
    first_failure: Option<AskError>,
    /// Time from the first request to the end of the last one; zero if it was not measured.
    time: Duration,
    first: Vec<Duration>,
    gaps: Vec<Duration>,
    /// Tokens of all answers.
    tokens: u64,
    /// Number of answers whose tokens the server counted, and the tokens of their prompts.
    counted: u64,
    prompt_tokens: u64,
    /// Cached tokens of each prompt for which the server reports them.
    cached: Vec<u64>,
}

impl Tally {
    fn add(&mut self, result: Result<Answer, AskError>) {
        self.requests += 1;
        match result {
            Err(error) => {
                self.failures += 1;
                self.first_failure.get_or_insert(error);
            }
            Ok(answer) => {
                self.first.extend(answer.first());
                self.gaps.extend(answer.gaps());
                self.tokens += answer.tokens();
                if let Some(usage) = answer.usage {
                    self.counted += 1;
                    self.prompt_tokens += usage.prompt_tokens;
                    self.cached.extend(usage.cached_tokens);
                }
            }
        }
    }

    fn first(&self) -> Times {
        self.first.iter().copied().collect()
    }

    fn gaps(&self) -> Times {
        self.gaps.iter().copied().collect()
    }

    /// Tokens per second; `None` if the time was not measured.
    fn tokens_per_s(&self) -> Option<f64> {
        ratio(self.tokens as f64, self.time.as_secs_f64())
    }

    /// Mean tokens of a prompt, as the server counts them.
    fn mean_prompt(&self) -> Option<f64> {
        ratio(self.prompt_tokens as f64, self.counted as f64)
    }

    fn json(&self) -> Value {
        json!({
            "requests": self.requests,
            "failures": self.failures,
            "first_failure": self.first_failure.as_ref().map(AskError::to_string),
            "mean_prompt_tokens": self.mean_prompt(),
            "tokens": self.tokens,
            "time_s": (!self.time.is_zero()).then_some(self.time.as_secs_f64()),
            "ttft_ms": self.first().json(),
            "inter_token_ms": self.gaps().json(),
            "tokens_per_s": self.tokens_per_s(),
        })
    }

    /// Median time to the first token, in milliseconds.
    fn first_ms(&self) -> Option<f64> {
        let first = &self.first;
        (!first.is_empty()).then(|| median(first.iter().map(|time| time.as_secs_f64() * 1e3)))
    }

    /// Mean number of cached tokens; `None` if the server does not report it.
    fn mean_cached(&self) -> Option<f64> {
        ratio(self.cached.iter().sum::<u64>() as f64, self.cached.len() as f64)
    }

    /// The JSON of one turn of several chats.
    fn turn_json(&self) -> Value {
        json!({
            "requests": self.requests,
            "failures": self.failures,
            "first_failure": self.first_failure.as_ref().map(AskError::to_string),
            "ttft_ms": self.first_ms(),
            "mean_prompt_tokens": self.mean_prompt(),
            "mean_cached_tokens": self.mean_cached(),
        })
    }

    /// A row of the table of turns.
    fn turn_row(&self) -> String {
        let figures = [self.first_ms(), self.mean_prompt(), self.mean_cached()];
        let [first, prompt, cached] = figures.map(|figure| column(figure, 9, 1));
        format!("{:8} {:6} {first} {prompt} {cached}\n", self.requests, self.failures)
    }

    /// A row of the table under [`HEADER`].
    fn row(&self, ratio_to_one: Option<f64>) -> String {
        let (first, gaps) = (self.first(), self.gaps());
        let ms = |figure| column(figure, 9, 1);
        format!(
            "{:8} {:6} {} {} {} {} {} {} {}\n",
            self.requests,
            self.failures,
            ms(first.percentile(50.0)),
            ms(first.percentile(99.0)),
            ms(gaps.percentile(50.0)),
            ms(gaps.percentile(99.0)),
            ms(gaps.max()),
            column(self.tokens_per_s(), 10, 1),
            column(ratio_to_one, 6, 2),
        )
    }

    /// A line about failures; empty if there were none.
    fn failed(&self, who: &str) -> String {
        match &self.first_failure {
            None => String::new(),
            Some(first) => {
                format!("{who}: {} of {} requests failed, first: {first}\n", self.failures, self.requests)
            }
        }
    }
}

/// The source of the token counts: the usage that the server reports, content deltas, or both.
fn counted_by<'a>(tallies: impl IntoIterator<Item = &'a Tally>) -> &'static str {
    let (mut answers, mut counted) = (0, 0);
    for tally in tallies {
        answers += tally.requests - tally.failures;
        counted += tally.counted;
    }
    match counted {
        0 => "content deltas",
        n if n == answers => "usage",
        _ => "usage, and content deltas where there is none",
    }
}

/// The columns of [`Tally::row`], after a first column for the row's name.
const HEADER: &str = "requests failed  TTFT p50       p99   gap p50       p99       max   tokens/s  of one\n";

fn closed(generator: &Generator, args: &BenchServe) -> Result<(), Error> {
    let mut levels = Vec::new();
    for &streams in args.concurrency.as_deref().unwrap_or(&CONCURRENCY) {
        levels.push((streams, generator.closed_loop(format!("{streams} streams"), streams, &|| false)?));
    }
    let tallies = || levels.iter().map(|(_, tally)| tally);
    generator.check_any(tallies())?;
    let one = levels.iter().find(|(streams, _)| *streams == 1).and_then(|(_, tally)| tally.tokens_per_s());
    let of_one = |tally: &Tally| tally.tokens_per_s().zip(one).and_then(|(all, one)| ratio(all, one));
    let counted = counted_by(tallies());

    if args.json {
        let mut report = generator.json(args.scenario, counted);
        report["prompt_tokens"] = generator.prompt_tokens.into();
        let level = |(streams, tally): &(u32, Tally)| {
            let mut level = json!({"streams": streams});
            let fields = tally.json().as_object().expect("a tally is an object").clone();
            level.as_object_mut().expect("just made").extend(fields);
            level["ratio_to_one"] = json!(of_one(tally));
            level
        };
        report["levels"] = levels.iter().map(level).collect();
        return print(&format!("{report}\n"));
    }
    let mut text = generator.heading();
    let own = tallies()
        .find_map(Tally::mean_prompt)
        .map_or(String::new(), |n| format!(" ({n:.0} by the server's count)"));
    text.push_str(&format!(
        "{} requests of each stream, prompts of about {} tokens{own}, answers of {}\n\
         tokens counted by {counted}; times in ms\nstreams {HEADER}",
        generator.requests,
        generator.prompt_tokens,
        generator.length()
    ));
    for (streams, tally) in &levels {
        text.push_str(&format!("{streams:7} {}", tally.row(of_one(tally))));
    }
    for (streams, tally) in &levels {
        text.push_str(&tally.failed(&format!("{streams} at once")));
    }
    print(&text)
}

fn mixed(generator: &Generator, args: &BenchServe) -> Result<(), Error> {
    let chats = args.chats.unwrap_or(CHATS);
    let long_tokens = args.long_tokens.unwrap_or(LONG_TOKENS);
    let arrivals = args.long_requests.unwrap_or(LONG_REQUESTS);

    // One token suffices, since only the prefill of a long prompt counts.
    let spinner = Spinner::start("measuring a long prompt alone".into());
    let alone = generator.ask(long_tokens, 1).map_err(|error| generator.error(&error))?;
    drop(spinner);
    let time = alone.first().unwrap_or(alone.ended - alone.sent);
    let taken = alone.usage.map_or(u64::from(long_tokens), |usage| usage.prompt_tokens);
    let prefill = taken as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE);
    let interval = time.div_f64(LONG_LOAD);

    let without = generator.closed_loop(format!("{chats} chats"), chats, &|| false)?;
    let left = AtomicU32::new(arrivals);
    let long = Mutex::new(Tally::default());
    let with = thread::scope(|scope| {
        let arrive = || {
            let since = Instant::now();
            thread::scope(|scope| {
                for i in 0..arrivals {
                    thread::sleep((since + interval * i).saturating_duration_since(Instant::now()));
                    let spawned = thread::Builder::new().spawn_scoped(scope, || {
                        let result = generator.ask(long_tokens, 1);
                        long.lock().expect("nothing panics under this lock").add(result);
                        left.fetch_sub(1, Ordering::Relaxed);
                    });
                    if let Err(error) = spawned {
                        left.store(0, Ordering::Relaxed);
                        return Err(Error::Runtime(error));
                    }
                }
                Ok(())
            })
        };
        let arriving = thread::Builder::new().spawn_scoped(scope, arrive).map_err(Error::Runtime)?;
        let what = format!("{chats} chats and long prompts");
        let with = generator.closed_loop(what, chats, &|| left.load(Ordering::Relaxed) > 0);
        arriving.join().expect("nothing panics in it")?;
        with
    })?;
    let long = long.into_inner().expect("nothing panics under this lock");
    generator.check_any([&without, &with])?;
    let counted = counted_by([&without, &with]);

    if args.json {
        let mut report = generator.json(args.scenario, counted);
        report["chats"] = chats.into();
        report["prompt_tokens"] = generator.prompt_tokens.into();
        report["long_tokens"] = taken.into();
        report["prefill_tokens_per_s"] = prefill.into();
        report["long_interval_s"] = interval.as_secs_f64().into();
        report["without_long"] = without.json();
        report["with_long"] = with.json();
        report["long"] = long.json();
        return print(&format!("{report}\n"));
    }
    let mut text = generator.heading();
    text.push_str(&format!(
        "{chats} chats, prompts of about {} tokens, answers of {}; tokens counted by {counted}; times in ms\n\
         a long prompt of {taken} tokens alone: {:.2} s, {prefill:.1} tokens/s; one arrives each {:.2} s\n\
         chats        {HEADER}alone        {}with long    {}long prompts {}",
        generator.prompt_tokens,
        generator.length(),
        time.as_secs_f64(),
        interval.as_secs_f64(),
        without.row(None),
        with.row(None),
        long.row(None),
    ));
    for (who, tally) in
        [("chats alone", &without), ("chats with long prompts", &with), ("long prompts", &long)]
    {
        text.push_str(&tally.failed(who));
    }
    print(&text)
}

fn second_turn(generator: &Generator, args: &BenchServe) -> Result<(), Error> {
    let history_tokens = args.history_tokens.unwrap_or(HISTORY_TOKENS);
    let (mut first, mut second) = (Tally::default(), Tally::default());
    let bar = Bar::of("requests", "chats of two turns", 2 * u64::from(generator.requests));
    for i in 0..u64::from(generator.requests) {
        let question = generator.prompts.question(history_tokens);
        let mut messages = vec![json!({"role": "user", "content": question})];
        let ask = |messages: &[Value]| {
            generator.client.ask(&generator.model, &Value::from(messages), generator.max_tokens)
        };
        let answer = ask(&messages);
        bar.set(2 * i + 1);
        let said = answer.as_ref().ok().map(|answer| answer.text.clone());
        first.add(answer);
        let Some(said) = said else { continue };
        messages.push(json!({"role": "assistant", "content": said}));
        messages.push(json!({"role": "user", "content": SECOND_QUESTION}));
        second.add(ask(&messages));
        bar.set(2 * i + 2);
    }
    drop(bar);
    generator.check_any([&first])?;
    generator.check_any([&second])?;
    let second_of_first =
        first.first_ms().zip(second.first_ms()).and_then(|(first, second)| ratio(second, first));

    if args.json {
        let counted = counted_by([&first, &second]);
        let mut report = generator.json(args.scenario, counted);
        report["history_tokens"] = history_tokens.into();
        report["first_turn"] = first.turn_json();
        report["second_turn"] = second.turn_json();
        report["second_of_first"] = json!(second_of_first);
        return print(&format!("{report}\n"));
    }
    let mut text = generator.heading();
    text.push_str(&format!(
        "{} chats, one after the other, a first question of about {history_tokens} tokens, answers of {}\n\
         turn   requests failed   TTFT ms    prompt    cached (median of the times, mean of the tokens)\n\
         first  {}second {}\
         the second turn's first token takes {} of the first's time\n",
        generator.requests,
        generator.length(),
        first.turn_row(),
        second.turn_row(),
        column(second_of_first, 0, 3),
    ));
    text.push_str(&first.failed("first turn"));
    text.push_str(&second.failed("second turn"));
    print(&text)
}

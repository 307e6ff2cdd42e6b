//! Sharing of the prefix cache: by API key, by `cache_salt`, or with all clients.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::ConnectInfo;
use serde_json::{Value, json};
use unicorn::api::{AccessPolicy, Keys, Options, Server};
use unicorn::config::SharePrefixes;
use unicorn::model::Limits;

use crate::support::app::{DEFAULTS, END_OF_TURN, OPTIONS, limits, loaded};
use crate::support::fake_runner::says;
use crate::support::http::{post_to, send_json};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

/// A route that generates.
struct Route {
    path: &'static str,
    /// Where the answer has the number of cached tokens, as a JSON pointer.
    cached: &'static str,
    /// A request body with a text as its prompt.
    body: fn(&str) -> Value,
}

const ROUTES: [Route; 4] = [
    Route {
        path: "/v1/chat/completions",
        cached: "/usage/prompt_tokens_details/cached_tokens",
        body: |text| json!({"messages": [{"role": "user", "content": text}]}),
    },
    Route {
        path: "/v1/completions",
        cached: "/usage/prompt_tokens_details/cached_tokens",
        body: |text| json!({"prompt": text}),
    },
    Route {
        path: "/v1/responses",
        cached: "/usage/input_tokens_details/cached_tokens",
        body: |text| json!({"input": text}),
    },
    Route {
        path: "/v1/messages",
        cached: "/usage/cache_read_input_tokens",
        body: |text| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 9}),
    },
];
/// Two keys of a server.
const ANN: &str = "ann-0123456789abcdef";
const BOB: &str = "bob-0123456789abcdef";

fn router(keys: &[&str], share_prefixes: Option<SharePrefixes>) -> Router {
    let keys = Keys::from_variable("test", &keys.join(",")).expect("valid keys");
    let options = Options { share_prefixes, ..OPTIONS };
    let server = Server::new("tiny", options, AccessPolicy { keys, ..AccessPolicy::default() });
    let ok = tokenizer().encode("ok", false).expect("encodes");
    let limits = Limits { max_sequences: 2, ..limits() };
    loaded(server, limits, DEFAULTS, says(&ok, END_OF_TURN)).router
}

/// Sends a text of several blocks as a prompt. Calls have the same text only if they have the same `topic`.
struct Asking<'a> {
    router: &'a Router,
    route: usize,
    topic: &'a str,
}

impl Asking<'_> {
    /// The number of prompt tokens that were cached, for the client with the API key `key`, or at the address `key`.
    async fn cached(&self, key: &str, more: Value) -> u64 {
        let Route { path, cached, body } = ROUTES[self.route];
        let text = format!("{} {}", self.topic, "once upon a time ".repeat(9));
        let mut request = post_to(path, with(body(&text), more).to_string());
        match key.parse::<SocketAddr>() {
            Ok(address) => drop(request.extensions_mut().insert(ConnectInfo(address))),
            Err(_) => drop(request.headers_mut().insert("x-api-key", key.parse().expect("a header"))),
        }
        let (status, _, reply) = send_json(self.router, request).await;
        assert_eq!(status, 200, "{path}: {reply}");
        reply.pointer(cached).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {reply}"))
    }
}

#[tokio::test]
async fn a_prefix_is_reused_for_the_same_key_and_not_for_another() {
    let router = router(&[ANN, BOB], None);
    for route in 0..ROUTES.len() {
        let asking = Asking { router: &router, route, topic: &format!("{route}") };
        assert_eq!(asking.cached(ANN, json!({})).await, 0, "{route}: a new prefix is not cached");
        assert!(asking.cached(ANN, json!({})).await > 20, "{route}: Ann reuses her own prefix");
        assert_eq!(asking.cached(BOB, json!({})).await, 0, "{route}: Bob must not reuse Ann's prefix");
        assert!(asking.cached(BOB, json!({})).await > 20, "{route}: Bob reuses his own prefix");
    }
}

#[tokio::test]
async fn a_cache_salt_shares_across_keys_but_only_with_the_same_salt() {
    let router = router(&[ANN, BOB], None);
    let salted = |salt: &str| json!({"cache_salt": salt});
    for route in 0..ROUTES.len() {
        let asking = Asking { router: &router, route, topic: &format!("{route}") };
        assert_eq!(asking.cached(ANN, salted("team-1")).await, 0, "{route}: a new prefix is not cached");
        assert!(asking.cached(BOB, salted("team-1")).await > 20, "{route}: the same salt shares");
        for (key, more) in
            [(ANN, json!({})), (BOB, json!({})), (ANN, salted("team-2")), (BOB, salted("TEAM-1"))]
        {
            assert_eq!(asking.cached(key, more.clone()).await, 0, "{route}: {key} {more}");
        }
        assert!(asking.cached(ANN, salted("team-2")).await > 20, "{route}: the same salt shares");
        assert!(asking.cached(ANN, json!({"cache_salt": null})).await > 20, "{route}: null is absent");
    }
}

#[tokio::test]
async fn a_server_with_one_key_or_none_shares_with_all_clients() {
    let alone = router(&[ANN], None);
    let asking = Asking { router: &alone, route: 0, topic: "a" };
    assert_eq!(asking.cached(ANN, json!({})).await, 0);
    assert!(asking.cached(ANN, json!({})).await > 20, "a server with only one key shares");
    let open = router(&[], None);
    let asking = Asking { router: &open, route: 0, topic: "a" };
    assert_eq!(asking.cached("10.0.0.1:1", json!({})).await, 0);
    assert!(asking.cached("10.0.0.2:1", json!({})).await > 20, "clients at other addresses share");
    // A salt separates its requests here too.
    assert_eq!(asking.cached("10.0.0.2:1", json!({"cache_salt": "mine"})).await, 0);
}

#[tokio::test]
async fn the_option_overrides_the_default_sharing() {
    let all = router(&[ANN, BOB], Some(SharePrefixes::All));
    let asking = Asking { router: &all, route: 0, topic: "a" };
    assert_eq!(asking.cached(ANN, json!({})).await, 0);
    assert!(asking.cached(BOB, json!({})).await > 20, "all keys share");

    let apart = router(&[], Some(SharePrefixes::Key));
    let asking = Asking { router: &apart, route: 0, topic: "a" };
    assert_eq!(asking.cached("10.0.0.1:1", json!({})).await, 0);
    assert_eq!(
        asking.cached("10.0.0.2:1", json!({})).await,
        0,
        "without keys, clients are distinguished by address"
    );
    assert!(asking.cached("10.0.0.1:2", json!({})).await > 20);
}

#[tokio::test]
async fn an_invalid_salt_is_refused_with_the_field() {
    let router = router(&[], None);
    for Route { path, body, .. } in ROUTES {
        for salt in [json!(""), json!("x".repeat(257)), json!(7), json!(["a"]), json!(true)] {
            let body = with(body("Hi"), json!({"cache_salt": salt}));
            let (status, _, reply) = send_json(&router, post_to(path, body.to_string())).await;
            let message = reply["error"]["message"].as_str().unwrap_or_default();
            assert!(status == 400 && message.starts_with("cache_salt: expected"), "{path} {salt}: {reply}");
            assert!(message.len() < 200, "{message}");
        }
        for salt in ["x", &"½".repeat(128), "\u{0}"] {
            let body = with(body("Hi"), json!({"cache_salt": salt}));
            let (status, _, reply) = send_json(&router, post_to(path, body.to_string())).await;
            assert_eq!(status, 200, "{path}: {reply}");
        }
    }
}

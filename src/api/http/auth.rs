//! Who may come in: API keys, the names the server answers to, origins of web pages, and how much one client may ask at
//! once. Decided from a request's head, before its body is read; `/health` and `/live` alone are open to all, and the page's files need
//! no key: a browser loads them before its user can give it one.
//!
//! With keys, a request needs one of them, and no web page has it unless its user gave it. Without keys whoever reaches
//! the port may ask, and the browser of somebody who does reaches it for every page they open. So then a request must
//! call the server by a name that no stranger can point at it (DNS rebinding), and one that a foreign page sends is
//! refused, unless CORS lets that page in.
//!
//! A name that is an address cannot be rebound, so every address will do.
//!
//! With keys a client is the key that matched, whatever else a request brings; without them it is the address that it came
//! from, and a key that is sent means nothing. What counts by client counts by that: fair turns, the requests under way, and
//! whose a kept response is.
//!
//! The policy can be replaced while the server runs ([`Server::set_access`](crate::api::Server::set_access)): requests that
//! are under way go on, and the next ones meet the new one. So nothing keeps a policy, or a part of one, for longer than a
//! request's head takes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use ring::hmac;
use ring::rand::SystemRandom;
use tower_http::cors::{AllowHeaders, AllowOrigin, AllowPrivateNetwork, CorsLayer};

use crate::api::error::ApiError;
use crate::api::http::keys::{Digest, Keys};
use crate::api::ids::REQUEST_ID;
use crate::api::page;
use crate::engine::ClientId;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// How long a browser may keep the answer to a preflight.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);
/// An error shows so much of what a client called itself or the server.
const MAX_SHOWN_CHARS: usize = 100;

#[derive(Debug, Clone)]
pub struct AccessPolicy {
    /// None: everybody may ask.
    pub keys: Keys,
    /// Names the server answers to besides `localhost` and addresses, where it has no keys; without port.
    pub allowed_hosts: Vec<String>,
    /// Pages that browsers may let in, as browsers name them (`https://chat.example.org`), or `*` for all.
    pub cors_origins: Vec<String>,
    /// Requests of one client that may be under way.
    pub requests_per_client: usize,
}

impl Default for AccessPolicy {
    fn default() -> Self {
        Self { keys: Keys::default(), allowed_hosts: vec![], cors_origins: vec![], requests_per_client: 128 }
    }
}

impl AccessPolicy {
    /// What answers preflights, and tells browsers which pages may read answers; none where no page may.
    pub(in crate::api) fn cors(self: &Arc<Self>) -> Option<CorsLayer> {
        if self.cors_origins.is_empty() {
            return None;
        }
        let origins = if self.cors_origins.iter().any(|origin| origin == "*") {
            AllowOrigin::any()
        } else {
            let policy = Arc::clone(self);
            AllowOrigin::predicate(move |origin, _| policy.lets_in(origin))
        };
        let policy = Arc::clone(self);
        let layer = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            // Clients send headers of their own with each version: those of the official ones alone are a dozen.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([HeaderName::from_static(REQUEST_ID), header::RETRY_AFTER])
            .allow_private_network(AllowPrivateNetwork::predicate(move |origin, _| policy.lets_in(origin)))
            .max_age(PREFLIGHT_AGE);
        Some(layer)
    }

    fn lets_in(&self, origin: &HeaderValue) -> bool {
        let is =
            |allowed: &String| allowed == "*" || allowed.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
        self.cors_origins.iter().any(is)
    }

    /// The key that lets a request in; none where it needs none.
    pub(in crate::api) fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Option<Digest>, ApiError> {
        if !self.keys.is_empty() {
            return if page::has(uri.path()) { Ok(None) } else { self.check_key(headers).map(Some) };
        }
        let names = headers.get_all(header::HOST).iter().map(HeaderValue::as_bytes);
        // Whatever is no browser may leave it out.
        for name in names.chain(uri.authority().map(|a| a.as_str().as_bytes())) {
            if !self.answers_to(name) {
                return Err(ApiError::ForeignHost(shown(name)));
            }
        }
        match headers.get(header::ORIGIN) {
            Some(origin) if changes(method) && !self.lets_in(origin) && !is_own(origin, uri, headers) => {
                Err(ApiError::ForeignOrigin(shown(origin.as_bytes())))
            }
            _ => Ok(None),
        }
    }

    /// The first that is one of the server's, of all that were sent.
    fn check_key(&self, headers: &HeaderMap) -> Result<Digest, ApiError> {
        let mut sent = keys_of(headers).peekable();
        if sent.peek().is_none() {
            return Err(ApiError::NoKey);
        }
        sent.find_map(|key| self.keys.find(key)).ok_or(ApiError::WrongKey)
    }

    fn answers_to(&self, name: &[u8]) -> bool {
        let Ok(authority) = Authority::try_from(name) else { return false };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        let allowed = || self.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host));
        !name.contains(&b'@')
            && (host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok() || allowed())
    }
}

/// Whether a request may do something, rather than ask how things are.
pub(in crate::api) fn changes(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD)
}

/// Whether a page that came from this server sent it.
fn is_own(origin: &HeaderValue, uri: &Uri, headers: &HeaderMap) -> bool {
    let host_of = |origin: &[u8]| {
        let at = origin.windows(3).position(|sign| sign == b"://")?;
        Some(origin[at + 3..].to_ascii_lowercase())
    };
    // A target in absolute form has the server's name too, and may come without `Host`.
    let authority = || uri.authority().map(|authority| authority.as_str().as_bytes());
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes).or_else(authority);
    host.is_some_and(|host| host_of(origin.as_bytes()) == Some(host.to_ascii_lowercase()))
}

/// The keys that a request came with, as OpenAI's and as Anthropic's clients send them; an empty one is none.
fn keys_of(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(b"Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key.trim_ascii())
    });
    let own = headers.get_all(X_API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
    bearer.chain(own).filter(|key| !key.is_empty())
}

/// Tells clients apart, by 64 bits of an HMAC under a secret that the process made for itself: who knows keys or addresses
/// cannot say whose number is whose, nor make two that are one. Of a million clients, two are one by chance with a
/// probability of 2^-25.
pub(in crate::api) struct Identities(hmac::Key);

impl Identities {
    pub fn new() -> Self {
        let secret = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        Self(secret.expect("the system has random numbers, or no server could be trusted"))
    }

    pub(in crate::api) fn of_key(&self, key: &Digest) -> ClientId {
        self.tag(b"key", key)
    }

    /// An IPv6 address counts by its first half: the other one is its owner's to choose.
    pub(in crate::api) fn of_address(&self, address: Option<IpAddr>) -> ClientId {
        match address.map(|address| address.to_canonical()) {
            None => self.tag(b"none", &[]),
            Some(IpAddr::V4(address)) => self.tag(b"v4", &address.octets()),
            Some(IpAddr::V6(address)) => self.tag(b"v6", &address.octets()[..8]),
        }
    }

    fn tag(&self, kind: &[u8], of: &[u8]) -> ClientId {
        let mut context = hmac::Context::with_key(&self.0);
        context.update(kind);
        context.update(of);
        let tag = context.sign();
        let (first, _) = tag.as_ref().split_first_chunk().expect("32 bytes");
        ClientId::from_be_bytes(*first)
    }
}

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(MAX_SHOWN_CHARS).collect()
}

/// How many requests of each client are under way; clients without any are forgotten.
#[derive(Debug, Default)]
pub(in crate::api) struct Places(Arc<Mutex<HashMap<ClientId, usize>>>);

impl Places {
    /// Requests of all clients that are under way.
    pub fn taken(&self) -> usize {
        self.0.lock().expect("nothing panics under this lock").values().sum()
    }

    /// None where the client has `most` already.
    pub(in crate::api) fn take(&self, client: ClientId, most: usize) -> Option<Place> {
        let mut taken = self.0.lock().expect("nothing panics under this lock");
        let n = taken.entry(client).or_default();
        if *n >= most {
            return None;
        }
        *n += 1;
        Some(Place { places: Arc::clone(&self.0), client })
    }
}

/// One request's place, free again when dropped.
pub(in crate::api) struct Place {
    places: Arc<Mutex<HashMap<ClientId, usize>>>,
    client: ClientId,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock().expect("nothing panics under this lock");
        if let Entry::Occupied(mut n) = taken.entry(self.client) {
            *n.get_mut() -= 1;
            if *n.get() == 0 {
                n.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(HeaderName, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn the_key_that_matched_is_found_wherever_it_stands() {
        let keys = Keys::from_variable("V", "alpha,beta").unwrap();
        let [alpha, beta] = [b"alpha".as_slice(), b"beta"].map(|key| keys.find(key).expect("one of them"));
        let policy = AccessPolicy { keys, ..AccessPolicy::default() };
        let (bearer, own) = (header::AUTHORIZATION, X_API_KEY);
        for (fields, found) in [
            (vec![(bearer.clone(), "Bearer alpha")], Ok(alpha)),
            (vec![(bearer.clone(), "bearer  beta ")], Ok(beta)),
            (vec![(own.clone(), "alpha")], Ok(alpha)),
            (vec![(bearer.clone(), "Bearer bogus"), (own.clone(), "alpha")], Ok(alpha)),
            (vec![(bearer.clone(), "Bearer alpha"), (own.clone(), "bogus")], Ok(alpha)),
            (vec![(bearer.clone(), "Basic beta"), (own.clone(), "alpha")], Ok(alpha)),
            (vec![(bearer.clone(), "Bearer bogus"), (own.clone(), "other")], Err(ApiError::WrongKey)),
            (vec![(bearer.clone(), "Bearer "), (own.clone(), "")], Err(ApiError::NoKey)),
        ] {
            assert_eq!(policy.check_key(&headers(&fields)), found, "{fields:?}");
        }
    }

    #[test]
    fn clients_are_told_apart_by_key_or_address_under_a_secret() {
        let (mine, others) = (Identities::new(), Identities::new());
        let address = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        let all = [
            mine.of_key(&[0; 32]),
            mine.of_key(&[1; 32]),
            mine.of_address(None),
            mine.of_address(address("0.0.0.0")),
            mine.of_address(address("10.0.0.1")),
            mine.of_address(address("10.0.0.2")),
            mine.of_address(address("::")),
            mine.of_address(address("2001:db8:0:1::")),
            mine.of_address(address("2001:db8:0:2::")),
            others.of_key(&[0; 32]),
            others.of_address(address("10.0.0.1")),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[..i].contains(one), "{i}");
        }
        for (one, same) in [("10.0.0.1", "::ffff:10.0.0.1"), ("2001:db8:0:1::", "2001:db8:0:1:ffff::9")] {
            assert_eq!(mine.of_address(address(one)), mine.of_address(address(same)), "{one} and {same}");
        }
    }

    #[test]
    fn names_that_a_stranger_could_point_here_are_not_answered_to() {
        let policy = AccessPolicy { allowed_hosts: vec!["box.lan".into()], ..AccessPolicy::default() };
        for name in [
            "localhost",
            "LOCALHOST:8010",
            "localhost.:1",
            "127.0.0.1:8010",
            "[::1]:8010",
            "[::1]",
            "192.168.1.9:80",
            "box.lan",
            "Box.LAN:8010",
        ] {
            assert!(policy.answers_to(name.as_bytes()), "{name}");
        }
        for name in [
            "",
            "evil.example",
            "evil.example:8010",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "xbox.lan",
            "localhost@evil.example",
            "evil.example@localhost",
            "127.1",
            "0x7f.1",
            "a b",
            "localhost/",
        ] {
            assert!(!policy.answers_to(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn places_are_counted_by_client_and_given_back() {
        let places = Places::default();
        let first = places.take(1, 2).expect("free");
        let second = places.take(1, 2).expect("free");
        assert!(places.take(1, 2).is_none());
        let other = places.take(2, 2).expect("another's are free");
        drop(first);
        drop(places.take(1, 2).expect("free again"));
        drop((second, other));
        assert!(places.0.lock().unwrap().is_empty(), "forgotten");
    }
}

//! Access: API keys, host names, origins of web pages, and the number of requests of one client. The decision needs only a
//! request's head. `/health` and `/live` are open to all clients, and the page's files need no key, because a browser loads
//! them before the user can enter one.
//!
//! With keys, a request needs one of them. A web page has no key unless the user entered it. Without keys, every process
//! that reaches the port may send requests, also a browser for any page that it shows. So without keys, a request must name
//! the server by a host name that another party cannot point at it (DNS rebinding), and a request of a foreign page is
//! refused, unless CORS allows that page. An address cannot be rebound, so every address is accepted.
//!
//! With keys, a client is identified by the key that matched. Without keys, it is identified by its address, and keys in
//! requests are ignored. Fair shares, the number of requests in progress and the owner of a stored response depend on it.
//!
//! The policy can be replaced while the server runs ([`Server::set_access`](crate::api::Server::set_access)). Requests in
//! progress continue, and new requests get the new policy. So no code keeps a policy, or a part of one, after it has checked
//! a request's head.

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

use crate::api::error::{ApiError, SHOULD_RETRY};
use crate::api::http::keys::{Digest, Keys};
use crate::api::ids::REQUEST_ID;
use crate::api::page;
use crate::engine::ClientId;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// How long a browser may keep the answer to a preflight.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);
/// The maximum length of a name that a client sent, in an error.
const MAX_SHOWN_CHARS: usize = 100;

#[derive(Debug, Clone)]
pub struct AccessPolicy {
    /// Without keys, every client is accepted.
    pub keys: Keys,
    /// Accepted host names without port, in addition to `localhost` and addresses, if there are no keys.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that are allowed (`https://chat.example.org`), or `*` for all.
    pub cors_origins: Vec<String>,
    /// The maximum number of requests of one client in progress.
    pub requests_per_client: usize,
}

/// Schemes of the pages of programs that are built of web pages, such as Obsidian and Visual Studio Code. No web page has
/// such an origin. Ollama admits these too.
const APPS: [&str; 4] = ["app://", "tauri://", "vscode-file://", "vscode-webview://"];

fn is_app(origin: &HeaderValue) -> bool {
    origin.to_str().is_ok_and(|origin| APPS.iter().any(|scheme| origin.starts_with(scheme)))
}

impl Default for AccessPolicy {
    fn default() -> Self {
        Self { keys: Keys::default(), allowed_hosts: vec![], cors_origins: vec![], requests_per_client: 128 }
    }
}

impl AccessPolicy {
    /// The layer that answers preflights and adds CORS headers to a request of this origin. `None` = no origin is allowed.
    pub(in crate::api) fn cors(self: &Arc<Self>, origin: Option<&HeaderValue>) -> Option<CorsLayer> {
        if self.cors_origins.is_empty() && !origin.is_some_and(is_app) {
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
            // The headers that clients send change with their versions, and the official clients have a dozen.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([
                HeaderName::from_static(REQUEST_ID),
                header::RETRY_AFTER,
                HeaderName::from_static(SHOULD_RETRY),
            ])
            .allow_private_network(AllowPrivateNetwork::predicate(move |origin, _| policy.lets_in(origin)))
            .max_age(PREFLIGHT_AGE);
        Some(layer)
    }

    fn lets_in(&self, origin: &HeaderValue) -> bool {
        let is =
            |allowed: &String| allowed == "*" || allowed.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
        self.cors_origins.iter().any(is) || is_app(origin)
    }

    /// The key that matched. `None` = the request needs no key.
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
        // Clients other than browsers may omit the host.
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

    /// The first of the sent keys that is one of the server's.
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

/// Whether a request with this method may change something.
pub(in crate::api) fn changes(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD)
}

/// Whether the request comes from a page of this server.
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

/// The keys of a request, as OpenAI's and as Anthropic's clients send them. Empty keys are skipped.
fn keys_of(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(b"Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key.trim_ascii())
    });
    let own = headers.get_all(X_API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
    bearer.chain(own).filter(|key| !key.is_empty())
}

/// Identifies clients by 64 bits of an HMAC under a random secret of the process, or under the secret of the folder that keeps
/// conversations, so that a client finds its own after a restart. Without the secret, a known key or address
/// cannot be matched to its number, and no collision can be made. Among a million clients, the probability that two have
/// the same number is 2^-25.
pub(in crate::api) struct Identities(hmac::Key);

impl Identities {
    pub fn new(secret: Option<&[u8; 32]>) -> Self {
        Self(match secret {
            Some(secret) => hmac::Key::new(hmac::HMAC_SHA256, secret),
            None => hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())
                .expect("the system has random numbers"),
        })
    }

    pub(in crate::api) fn of_key(&self, key: &Digest) -> ClientId {
        self.tag(b"key", key)
    }

    /// Only the first half of an IPv6 address counts, because a client can choose the second half.
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

/// The number of requests in progress of each client that has any.
#[derive(Debug, Default)]
pub(in crate::api) struct Places(Arc<Mutex<HashMap<ClientId, usize>>>);

impl Places {
    /// The number of requests of all clients in progress.
    pub fn taken(&self) -> usize {
        self.0.lock().expect("nothing panics under this lock").values().sum()
    }

    /// `None` = the client already has `most` places.
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

/// The place of one request; dropping it frees the place.
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
    fn a_valid_key_is_found_in_either_header() {
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
    fn clients_are_identified_by_key_or_address_under_a_secret() {
        let (mine, others) = (Identities::new(None), Identities::new(None));
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
    fn only_addresses_localhost_and_allowed_hosts_are_accepted() {
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
        let other = places.take(2, 2).expect("the other client's places are free");
        drop(first);
        drop(places.take(1, 2).expect("free again"));
        drop((second, other));
        assert!(places.0.lock().unwrap().is_empty(), "forgotten");
    }
}

//! Which requests share entries of the prefix cache. How long a prompt takes, and `cached_tokens`, reveal whether a
//! similar prompt came before.
//!
//! A `cache_salt` decides for its request: requests with the same salt share, whichever clients they come from.
//! If there are several keys, requests without a salt share within their client; otherwise, all requests without a salt
//! share. [`Options::share_prefixes`](super::Options) overrides this. It is decided for each request, because keys change.

use crate::api::server::Server;
use crate::config::SharePrefixes;
use crate::engine::{CacheSalt, ClientId};

/// The salt of a client's request whose `cache_salt` is `asked`.
pub(in crate::api) fn salt_of(server: &Server, client: ClientId, asked: Option<&str>) -> CacheSalt {
    let by_client = match server.options.share_prefixes {
        Some(share) => share == SharePrefixes::Key,
        None => server.access().keys.len() > 1,
    };
    salt(asked, by_client.then_some(client))
}

/// The first byte of a salt is its kind, so no `cache_salt` equals the salt of a client, or the empty salt.
fn salt(asked: Option<&str>, client: Option<ClientId>) -> CacheSalt {
    match (asked, client) {
        (Some(asked), _) => CacheSalt::new([b"a", asked.as_bytes()].concat()),
        (None, Some(client)) => CacheSalt::new([&b"c"[..], &client.to_be_bytes()].concat()),
        (None, None) => CacheSalt::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requested_salt_never_equals_the_salt_of_a_client() {
        let client = ClientId::from_be_bytes(*b"abcdefgh");
        let own = salt(None, Some(client));
        // The bytes of a client's salt, with and without the byte of its kind.
        for asked in ["abcdefgh", "cabcdefgh", "bcdefgh", "c", "a"] {
            assert!(salt(Some(asked), None) != own && salt(Some(asked), Some(client)) != own, "{asked}");
            assert!(salt(Some(asked), None) != salt(None, None), "{asked}");
        }
        assert!(own != salt(None, None) && own != salt(None, Some(client + 1)));
        assert!(salt(Some("x"), None) == salt(Some("x"), Some(client)), "for any client");
    }
}

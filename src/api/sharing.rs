//! With whom a request shares what the prefix cache has: how long a prompt takes, and `cached_tokens`, tell whether somebody
//! asked the like of it before.
//!
//! A request's `cache_salt` decides, where it has one: all of the same salt share, whoever they are. Others share with those of
//! their own client alone where there are several keys, and with all of their kind otherwise, unless
//! [`Options::share_prefixes`](super::Options) says which. It is decided anew for each request, as keys come and go.

use crate::api::server::Server;
use crate::config::SharePrefixes;
use crate::engine::{CacheSalt, ClientId};

/// The salt of a client's request that gives `asked`.
pub(in crate::api) fn salt_of(server: &Server, client: ClientId, asked: Option<&str>) -> CacheSalt {
    let by_client = match server.options.share_prefixes {
        Some(share) => share == SharePrefixes::Key,
        None => server.access().keys.len() > 1,
    };
    salt(asked, by_client.then_some(client))
}

/// Its first byte says of which kind it is, so that no `cache_salt` is that of a client, or of those who have none.
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
    fn no_salt_that_is_asked_for_is_that_of_a_client() {
        let client = ClientId::from_be_bytes(*b"abcdefgh");
        let own = salt(None, Some(client));
        // What a client's salt is made of, with and without what stands before it.
        for asked in ["abcdefgh", "cabcdefgh", "bcdefgh", "c", "a"] {
            assert!(salt(Some(asked), None) != own && salt(Some(asked), Some(client)) != own, "{asked}");
            assert!(salt(Some(asked), None) != salt(None, None), "{asked}");
        }
        assert!(own != salt(None, None) && own != salt(None, Some(client + 1)));
        assert!(salt(Some("x"), None) == salt(Some("x"), Some(client)), "whoever asks");
    }
}

//! The server's access policy from a configuration, at the start and at each reload.

use std::net::SocketAddr;
use std::path::Path;

use super::super::error::Error;
use super::super::remote::KEY_VARIABLE as CLIENT_KEY_VARIABLE;
use crate::api::{AccessPolicy, Keys};
use crate::config;

/// API keys in addition to those of the file, separated by commas or blanks.
const KEYS_VARIABLE: &str = "UNICORN_API_KEYS";

/// The file of keys from systemd (`LoadCredential=`), in the folder that `CREDENTIALS_VARIABLE` names. It is empty if
/// `/etc/unicorn/api-keys` does not exist.
const CREDENTIAL: &str = "api-keys";
const CREDENTIALS_VARIABLE: &str = "CREDENTIALS_DIRECTORY";

/// The access policy, with all keys of the file, the systemd credential and the environment.
pub fn access_policy(options: &config::Server) -> Result<AccessPolicy, Error> {
    let file_keys = options.api_key_file.as_ref().map(|path| Keys::read(path.as_ref())).transpose()?;
    let credential = std::env::var_os(CREDENTIALS_VARIABLE).map(|folder| Path::new(&folder).join(CREDENTIAL));
    let credential = credential.filter(|path| path.exists());
    let credential_keys = credential.map(|path| Keys::read_any(&path)).transpose()?;
    let variable_keys = match std::env::var(KEYS_VARIABLE) {
        Ok(text) => Keys::from_variable(KEYS_VARIABLE, &text)?,
        Err(std::env::VarError::NotPresent) => Keys::default(),
        Err(error) => return Err(Error::Argument(format!("{KEYS_VARIABLE}: {error}"))),
    };
    let mut allowed_hosts = options.allowed_hosts.clone();
    allowed_hosts.push(options.host.clone());
    let cors_origins = options.cors_origins.clone();
    let keys = variable_keys.and(file_keys.unwrap_or_default()).and(credential_keys.unwrap_or_default());
    if keys.is_empty() && cors_origins.iter().any(|origin| origin == "*") {
        tracing::warn!(
            "every web page that is opened in a browser on this machine can use this server: \
             server.cors_origins is \"*\", and no API key is required"
        );
    }
    if keys.is_empty() && std::env::var_os(CLIENT_KEY_VARIABLE).is_some_and(|key| !key.is_empty()) {
        tracing::warn!(
            "no API key is required: {CLIENT_KEY_VARIABLE} is the key that commands such as `unicorn run` send; the \
             server's own keys are in {KEYS_VARIABLE}"
        );
    }
    Ok(AccessPolicy { keys, allowed_hosts, cors_origins, requests_per_client: options.requests_per_client })
}

/// Refuses to serve without keys on an address that other machines can reach, unless the configuration allows it.
pub fn check_keyless(address: SocketAddr, keyless: bool, options: &config::Server) -> Result<(), Error> {
    if !keyless || !is_public(address) {
        return Ok(());
    }
    if !options.allow_keyless {
        return Err(Error::Keyless(address));
    }
    tracing::warn!("every client that can reach {address} can use this server: no API key is required");
    Ok(())
}

/// Whether other machines can reach the address.
pub fn is_public(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

//! Requests of a soak test: to any route, and those that no correct client sends.

use std::io::Read;

use ureq::SendBody;
use ureq::http::Method;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use ureq::http::request::Builder;

use crate::cli::bench::client::{AskError, Client, EventError, Events, MAX_EVENT_BYTES, MAX_STREAM_BYTES};

/// Longest answer to [`exchange`].
const MAX_ANSWER_BYTES: u64 = 1 << 24;

/// The answer to any request, as received.
pub struct Exchanged {
    pub status: u16,
    /// Its content type without parameters; empty if it has none.
    pub kind: String,
    pub body: Vec<u8>,
}

/// Sends any request to a path that begins at the server's root, and reads the answer, whether or not its status is
/// a success.
pub fn exchange(
    client: &Client,
    method: &Method,
    path: &str,
    body: Option<&str>,
) -> Result<Exchanged, AskError> {
    let request = at(client, method, path);
    let mut response = match body {
        None => client.run(request, ()),
        Some(body) => client.run(request.header(CONTENT_TYPE, "application/json"), body),
    }?;
    let kind = response.body().mime_type().unwrap_or_default().to_owned();
    let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
    let body = body.map_err(|error| client.before_answer(&error))?;
    Ok(Exchanged { status: response.status().as_u16(), kind, body })
}

/// Sends a request for a stream, and closes the connection after the stream's first event.
pub fn leave_midway(client: &Client, path: &str, body: &str) -> Result<(), AskError> {
    let request = at(client, &Method::POST, path).header(CONTENT_TYPE, "application/json");
    let mut response = client.run(request, body)?;
    if !response.status().is_success() {
        return Err(client.refusal(&mut response));
    }
    let stream = response.into_body().into_with_config().limit(MAX_STREAM_BYTES).reader();
    match Events::new(stream).next() {
        Ok(_) => Ok(()),
        Err(EventError::TooLong) => {
            Err(AskError::Foreign(format!("an event of more than {MAX_EVENT_BYTES} bytes")))
        }
        Err(EventError::Io(error)) => Err(client.before_answer(&ureq::Error::from(error))),
    }
}

/// Announces a body, sends half of it, and closes the connection. The server has nothing to answer.
pub fn leave_amid_body(client: &Client, path: &str, body: &str) {
    struct Half<'a>(&'a [u8]);
    impl Read for Half<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            match self.0.read(buffer)? {
                0 => Err(std::io::Error::other("the client leaves")),
                n => Ok(n),
            }
        }
    }
    let mut half = Half(&body.as_bytes()[..body.len() / 2]);
    let request = at(client, &Method::POST, path).header(CONTENT_LENGTH, body.len());
    drop(client.run(request, SendBody::from_reader(&mut half)));
}

/// A request to a path that begins at the root: the base URL without its `/v1`.
fn at(client: &Client, method: &Method, path: &str) -> Builder {
    let root = client.url().strip_suffix("/v1").unwrap_or(client.url());
    client.request(method, &format!("{root}{path}"))
}

/// The data of all events in a stream that has ended; `None` if an event is too long.
pub fn events(stream: &[u8]) -> Option<Vec<String>> {
    let mut events = Events::new(stream);
    std::iter::from_fn(|| events.next().transpose()).collect::<Result<_, _>>().ok()
}

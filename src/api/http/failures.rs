//! Handles internal failures. If a handler panics, the client gets 500, and the connection stays open. Every response of 500
//! and above is one line of the log.
//!
//! A line is in its request's span, which has the request's id and route. No line repeats a prompt: the standard library's
//! panic about a wrong string index quotes the string, and the line omits that text.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;

use crate::api::error::ApiError;
use crate::text::panic_message;

/// The log's text for a failed response whose body is not an [`ApiError`].
#[derive(Clone)]
pub(in crate::api) struct Why {
    pub words: String,
    /// Whether the log already has the cause, so that the response is not logged.
    pub is_expected: bool,
}

/// Answers in place of a handler that panicked.
pub(in crate::api) async fn catch(request: Request, next: Next) -> Response {
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    answered.unwrap_or_else(|panic| panicked("", &*panic).into_response())
}

/// The error for a panic. `doing` names the work that panicked, if that says more than the route.
pub(in crate::api) fn panicked(doing: &str, panic: &(dyn Any + Send)) -> ApiError {
    let shown = panic_message(panic);
    ApiError::Panic(if doing.is_empty() { shown } else { format!("{doing}: {shown}") })
}

/// Logs a response that reports a failure of the server.
pub(in crate::api) fn log_response(response: &Response) {
    let status = response.status();
    match (response.extensions().get::<ApiError>(), response.extensions().get::<Why>()) {
        (Some(error), _) => log(status, &error.logged()),
        (None, Some(Why { words, is_expected: true })) => {
            tracing::debug!(status = status.as_u16(), "{words}");
        }
        (None, Some(Why { words, is_expected: false })) => log(status, words),
        (None, None) => log(status, "failed without a reason"),
    }
}

/// Logs an error that ended a stream. The stream's headers had reported no error.
pub(in crate::api) fn log_in_stream(error: &ApiError) {
    if error.status().is_server_error() {
        log(error.status(), &format!("within a stream: {}", error.logged()));
    } else {
        // The error's message may quote the request, so only its code is logged.
        tracing::info!("broken off: {}", error.code());
    }
}

fn log(status: StatusCode, why: &str) {
    let why = why.replace('\n', " ");
    match status.as_u16() {
        status @ 500 => tracing::error!(status, "{why}"),
        // Such a failure is temporary, or the log already has the cause of the server's end.
        status => tracing::warn!(status, "{why}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::body::Body;
    use axum::routing::post;
    use futures::{Stream, StreamExt, stream};
    use http_body_util::BodyExt;
    use serde_json::Value;
    use tower::ServiceExt;
    use tracing::subscriber::DefaultGuard;

    use super::*;
    use crate::api::around;
    use crate::api::exchange;
    use crate::api::exchange::tests::OPTIONS;
    use crate::api::http::auth::AccessPolicy;
    use crate::api::server::Server;

    fn server() -> Arc<Server> {
        Server::new("m", OPTIONS, AccessPolicy::default())
    }

    /// The log lines of this thread, as text.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Log {
        fn begin() -> (Self, DefaultGuard) {
            let log = Self::default();
            let sink = log.clone();
            let subscriber = tracing_subscriber::fmt().with_writer(move || sink.clone()).with_ansi(false);
            let guard = tracing::subscriber::set_default(subscriber.finish());
            (log, guard)
        }

        fn errors(&self) -> Vec<String> {
            let text = String::from_utf8(self.0.lock().expect("sound").clone()).expect("UTF-8");
            text.lines().filter(|line| line.contains(" ERROR ")).map(str::to_owned).collect()
        }
    }

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("sound").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_panic_has_the_error_format_of_its_route() {
        async fn broken() -> Response {
            panic!("no such thing")
        }
        let (log, _here) = Log::begin();
        let routes = Router::new().route("/v1/messages", post(broken)).route("/v1/completions", post(broken));
        let router = around(routes, server());
        for (path, place, kind) in [
            ("/v1/messages", "/error/type", "api_error"),
            ("/v1/completions", "/error/code", "internal_error"),
        ] {
            let request =
                Request::post(path).header("x-request-id", "abc").body(Body::empty()).expect("sound");
            let response = router.clone().oneshot(request).await.expect("handlers do not fail");
            assert_eq!(
                (response.status().as_u16(), &response.headers()["x-request-id"]),
                (500, &"abc".parse().unwrap())
            );
            let body = response.into_body().collect().await.expect("a body").to_bytes();
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(body.pointer(place).and_then(Value::as_str), Some(kind), "{body}");
            assert_eq!(
                body.get("request_id").and_then(Value::as_str),
                (path == "/v1/messages").then_some("abc")
            );
            assert!(!body.to_string().contains("no such thing"), "{body}");
        }
        let errors = log.errors();
        assert_eq!(errors.len(), 2, "{errors:#?}");
        for (line, route) in errors.iter().zip(["/v1/messages", "/v1/completions"]) {
            assert!(line.contains("id=\"abc\"") && line.contains("status=500"), "{line}");
            assert!(line.contains(&format!("route=\"{route}\"")) && line.contains("no such thing"), "{line}");
        }
    }

    /// A stream of two pieces, which panics after them.
    fn breaks() -> impl Stream<Item = Result<String, ApiError>> {
        stream::iter(0..).map(|n| if n < 2 { Ok(n.to_string()) } else { panic!("at the {n}nd piece") })
    }

    #[tokio::test]
    async fn a_panic_within_a_stream_ends_it_with_an_error() {
        let (log, _here) = Log::begin();
        let lines = exchange::until_error(breaks(), exchange::failed_lines).map(exchange::line);
        let response = exchange::server_sent(&server(), stream::empty(), lines);
        let body = response.into_body().collect().await.expect("a whole body").to_bytes();
        let body = std::str::from_utf8(&body).expect("UTF-8");
        let lines: Vec<&str> = body.split("\n\n").filter(|line| !line.is_empty()).collect();
        let ["data: 0", "data: 1", error, "data: [DONE]"] = lines[..] else { panic!("{body}") };
        let error: Value = serde_json::from_str(&error["data: ".len()..]).expect("JSON");
        assert_eq!(error["error"]["code"], "internal_error", "{error}");
        assert!(!body.contains("2nd"), "{body}");
        let errors = log.errors();
        assert!(errors.len() == 1 && errors[0].contains("at the 2nd piece"), "{errors:#?}");
    }

    #[tokio::test]
    async fn a_panic_of_a_worker_is_an_error_that_names_the_work() {
        let server = server();
        let work = || -> Result<(), _> { panic!("of {}", 1) };
        let error =
            exchange::on_worker(&server, 1, "preparing a prompt", work).await.expect_err("it panicked");
        assert_eq!(error, ApiError::Panic("preparing a prompt: of 1".into()));
        assert_eq!(
            (error.status().as_u16(), error.logged()),
            (500, "a panic: preparing a prompt: of 1".into())
        );
        assert!(!error.to_string().contains("preparing"), "{error}");
    }
}

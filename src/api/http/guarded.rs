//! A response body that keeps a value until the body is sent or dropped. So a place that a request takes lasts as long
//! as its answer does, even if the answer is a stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};

struct Held<T> {
    body: Body,
    _kept: T,
}

/// Returns `response` with a body that drops `kept` when the body is dropped.
pub(in crate::api) fn hold<T: Send + Unpin + 'static>(response: Response<Body>, kept: T) -> Response<Body> {
    response.map(|body| Body::new(Held { body, _kept: kept }))
}

impl<T: Unpin> HttpBody for Held<T> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.body).poll_frame(cx).map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

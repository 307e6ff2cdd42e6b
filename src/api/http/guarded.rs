//! A response body that keeps something until it is sent, or given up: a place that a request takes lasts as long as
//! its answer does, also where that is a stream.

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

/// `response`, which drops `kept` when its body is dropped.
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

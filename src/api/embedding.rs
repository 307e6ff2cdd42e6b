//! Embeds texts: the mean of the hidden states after the model's final norm, scaled to length 1.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesOrdered;

use crate::api::error::ApiError;
use crate::api::exchange::Caller;
use crate::api::http::counters::Followed;
use crate::api::http::fair_semaphore::FairPermit;
use crate::api::server::Server;
use crate::engine::{Event, KeepAlive, Request, SubmitError, Timings, TokenStream};
use crate::library::InUse;
use crate::session::{Reason, Service};

/// The maximum number of texts of one request in the engine: enough to fill a step, and few compared with other requests.
const AT_ONCE: usize = 8;

/// How often, and how long each time, a request waits for a place in the queue once some of its texts are embedded.
const MAX_WAITS: u32 = 150;
const WAIT: Duration = Duration::from_millis(200);

/// The texts of a request, none of which is too long.
pub(in crate::api) struct Texts {
    /// The field that has them.
    at: &'static str,
    ids: Vec<Vec<u32>>,
    keep_alive: KeepAlive,
}

impl Texts {
    /// The engine would refuse a long text only after others were embedded.
    pub fn new(
        service: &Service,
        at: &'static str,
        ids: Vec<Vec<u32>>,
        keep_alive: KeepAlive,
    ) -> Result<Self, ApiError> {
        let context = service.engine().limits().max_context;
        if let Some(long) = ids.iter().find(|ids| ids.len() >= context) {
            let error = SubmitError::ContextExceeded { prompt: long.len(), max_tokens: None, context };
            return Err(ApiError::from(error).in_prompt(at));
        }
        Ok(Self { at, ids, keep_alive })
    }
}

/// Refuses a number of dimensions that is not the model's.
pub(in crate::api) fn check_dimensions(service: &Service, asked: Option<i64>) -> Result<(), ApiError> {
    let hidden_size = service.engine().limits().hidden_size;
    if asked.is_none_or(|n| n == hidden_size as i64) {
        return Ok(());
    }
    let problem = format!("this model's embeddings have {hidden_size}, and cannot be shortened");
    Err(ApiError::unsupported("dimensions", problem))
}

/// Embeds texts in their order. `arriving` is the request's permit.
pub(in crate::api) async fn embed_texts(
    server: &Server,
    caller: &Caller,
    service: &InUse,
    arriving: FairPermit,
    Texts { at, ids, keep_alive }: Texts,
) -> Result<Vec<(Vec<f32>, Timings)>, ApiError> {
    let mut inputs = ids.into_iter().peekable();
    let (mut in_progress, mut embedded) = (FuturesOrdered::new(), Vec::with_capacity(inputs.len()));
    let (mut arriving, mut waits) = (Some(arriving), 0);
    let purpose = caller.purpose();
    loop {
        while in_progress.len() < AT_ONCE
            && let Some(ids) = inputs.peek()
        {
            let (ids, client, priority) = (ids.clone(), caller.id(), purpose.priority);
            // The model must not be unloaded between two texts.
            let keep_alive = if inputs.len() > 1 { KeepAlive::Configured } else { keep_alive };
            let request = Request { client, priority, keep_alive, pooling: true, ..Request::new(ids) };
            match service.engine().submit(request) {
                Ok(events) => {
                    let followed = server.metrics.follow(service.model().id(), 1, caller.client.arrived);
                    in_progress.push_back(embedding(events, followed));
                }
                Err(SubmitError::QueueFull { .. }) if !in_progress.is_empty() => break,
                // Other requests took the places. Wait, so that finished embeddings are not lost.
                Err(SubmitError::QueueFull { .. }) if arriving.is_none() && waits < MAX_WAITS => {
                    waits += 1;
                    tokio::time::sleep(WAIT).await;
                    continue;
                }
                Err(error) => return Err(ApiError::from(error).in_prompt(at)),
            }
            inputs.next();
            waits = 0;
        }
        // From here on, the engine's queue is the limit.
        if arriving.take().is_some() {
            server.metrics.taken(service.model().id(), purpose);
        }
        match in_progress.next().await {
            Some(done) => embedded.push(done?),
            None => break,
        }
    }
    Ok(embedded)
}

/// Collects one text's embedding from the engine's events. Dropping the future cancels the embedding.
async fn embedding(mut events: TokenStream, mut followed: Followed) -> Result<(Vec<f32>, Timings), ApiError> {
    let mut embedding = Vec::new();
    while let Some(event) = events.next().await {
        followed.event(&event);
        match event {
            Event::Pooled { state } => embedding = unit(state),
            Event::Finished { timings, .. } => {
                followed.ended(0, Reason::Stop, &timings);
                return Ok((embedding, timings));
            }
            Event::Failed(error) => return Err(error.into()),
            Event::Prompt { .. } | Event::Token { .. } => {} // not requested
        }
    }
    Err(ApiError::Bug("an embedding had no end".into()))
}

/// Scales a vector to length 1. A vector of zeros has no direction, and is returned unchanged.
fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

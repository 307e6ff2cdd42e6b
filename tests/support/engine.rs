//! Requests to an engine and their results, for tests without a server.

use unicorn::engine::{EngineHandle, Event, PromptImage, Request, TokenStream};
use unicorn::model::SamplingParams;

use super::waits::wait_until;

/// The id that ends the answers to [`request`].
pub const END: u32 = 106;

pub fn request(prompt: &[u32], max_tokens: usize) -> Request {
    let sampling = SamplingParams { stop_token_ids: vec![END], ..SamplingParams::GREEDY };
    Request { max_tokens: Some(max_tokens), sampling: sampling.into(), ..Request::new(prompt.to_vec()) }
}

/// Image `n` of one pixel, at `tokens` positions from `start` on.
pub fn image_at(start: usize, tokens: usize, n: u8) -> PromptImage {
    PromptImage { positions: start..start + tokens, hash: [n; 32], size: [1; 2], pixels: [n; 3].into() }
}

/// Image `n` of a token for each of its pixels, from `start` on. Images of different sizes have different hashes.
pub fn image_of_size(start: usize, size: [usize; 2], n: u8) -> PromptImage {
    let tokens = size[0] * size[1];
    let mut hash = [n; 32];
    hash[..2].copy_from_slice(&size.map(|side| side as u8));
    PromptImage { positions: start..start + tokens, hash, size, pixels: vec![n; 3 * tokens].into() }
}

/// The ids of all token events, and the last event.
pub fn collect(stream: &mut TokenStream) -> (Vec<u32>, Event) {
    let mut ids = Vec::new();
    loop {
        match stream.blocking_next().expect("a stream ends with a last event") {
            Event::Token { id, .. } => ids.push(id),
            last => {
                assert_eq!(stream.blocking_next(), None, "no event may follow the last one");
                return (ids, last);
            }
        }
    }
}

/// Whether no request runs or waits and no block is held.
pub fn is_at_rest(engine: &EngineHandle) -> bool {
    let stats = engine.stats();
    stats.running == 0 && stats.waiting == 0 && stats.full.held == 0 && stats.sliding.held == 0
}

/// Waits until [`is_at_rest`].
pub fn assert_all_free(engine: &EngineHandle) {
    wait_until("no request, and no held block", || is_at_rest(engine));
}

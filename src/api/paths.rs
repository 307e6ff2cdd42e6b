//! Paths that are not in the document: routes without `/v1`, and what to request instead of a path that is not a route.

use std::borrow::Cow;

/// The paths that are answered with and without `/v1`, because some clients do not add `/v1` to the base URL. The document
/// has each path once, with `/v1`. `GET /models` is not in this list: it is a route of llama.cpp that the document has.
pub(in crate::api) const WITHOUT_V1: [&str; 7] = [
    "/chat/completions",
    "/chat/completions/input_tokens",
    "/completions",
    "/responses",
    "/responses/input_tokens",
    "/messages",
    "/embeddings",
];

/// The path by which the document knows a route.
pub(in crate::api) fn documented(path: &str) -> Cow<'_, str> {
    if WITHOUT_V1.contains(&path) { format!("/v1{path}").into() } else { path.into() }
}

/// Routes of other servers and mistakes in base URLs, each with what to do here instead. A path that ends with `/*` means
/// all paths below it. All except the first few are known with and without `/v1`.
const ELSEWHERE: [(&[&str], &str); 22] = [
    (&["/v1"], "this is a base URL: GET /v1/models names the model, and POST /v1/chat/completions asks it"),
    // llama.cpp.
    (
        &["/props"],
        "GET /v1/models has the model's name and context, and GET /status what the server does and holds",
    ),
    (
        &["/slots", "/slots/*"],
        "answers share the cache by blocks, and there are no slots: GET /status has what runs; with kv.disk.path, the server \
         itself keeps conversations on disk and resumes them, and POST /kv/clear removes them",
    ),
    (&["/completion", "/generate", "/generate_stream"], "send POST /v1/completions, as to OpenAI"),
    (
        &["/infill"],
        "the model was not trained to fill in between two texts: POST /v1/completions continues one",
    ),
    (
        &["/apply-template"],
        "POST /tokenize with messages has a conversation's tokens, and POST /detokenize their text",
    ),
    (&["/embedding"], "send POST /v1/embeddings, as to OpenAI"),
    (
        &["/rerank", "/reranking", "/score", "/classify", "/pooling", "/v2/rerank"],
        "the model was not trained to judge texts: POST /v1/embeddings has vectors to compare",
    ),
    (
        &["/lora-adapters", "/load_lora_adapter", "/unload_lora_adapter"],
        "no adapters are served: merge the adapter into the checkpoint, and start the server with that",
    ),
    // vLLM and other servers.
    (
        &["/version", "/server_info", "/info", "/load"],
        "GET /status has the server's version, and what it does and holds",
    ),
    (&["/ping"], "GET /live says whether the server runs, and GET /health whether it can answer"),
    (
        &["/sleep", "/wake_up", "/is_sleeping"],
        "POST /models/unload unloads the model, and POST /models/load or the next request loads it again",
    ),
    (
        &["/reset_prefix_cache"],
        "the prefix cache cannot be reset: a request with its own cache_salt does not use it, and POST /kv/clear empties what \
         kv.disk.path keeps on disk",
    ),
    (&["/invocations"], "send POST /v1/chat/completions, as to OpenAI"),
    // OpenAI and Anthropic.
    (
        &["/audio/*", "/images/*", "/videos", "/videos/*", "/realtime", "/realtime/*"],
        "the model reads and writes only text: use POST /v1/chat/completions",
    ),
    (
        &["/moderations"],
        "no model for moderation is served: POST /v1/chat/completions can ask this one for its opinion",
    ),
    (
        &["/assistants", "/assistants/*", "/threads", "/threads/*", "/conversations", "/conversations/*"],
        "POST /v1/responses stores a conversation, which previous_response_id continues",
    ),
    (
        &["/files", "/files/*", "/uploads", "/uploads/*", "/vector_stores", "/vector_stores/*"],
        "the server keeps no files: put their text into the messages of POST /v1/chat/completions",
    ),
    (
        &["/batches", "/batches/*", "/messages/batches", "/messages/batches/*"],
        "there are no batches: send single requests, with the header `X-Unicorn-Priority: background`",
    ),
    (
        &["/fine_tuning/*", "/fine-tunes", "/evals", "/evals/*"],
        "the server does not train or evaluate models: `unicorn serve --model` serves a checkpoint that was tuned elsewhere",
    ),
    (
        &["/engines", "/engines/*", "/edits"],
        "OpenAI has removed it: GET /v1/models and POST /v1/chat/completions replace it",
    ),
    (&["/complete"], "Anthropic has replaced it: send POST /v1/messages"),
];

/// Routes of Ollama that change models, each with why this server does not have it.
const NOT_IMPLEMENTED: [(&str, &str); 4] = [
    ("/api/create", "models are made elsewhere, and `unicorn quantize` changes how their weights are stored"),
    ("/api/push", "this server uploads nothing: the tools of the hub do"),
    ("/api/copy", "`aliases` of models.serve and server.model_aliases give a model another name"),
    ("/api/blobs/", "models are read from files, and are not uploaded"),
];

/// Why the server does not have this route of Ollama's; `None` if it is none of those that change models.
pub(in crate::api) fn not_implemented(path: &str) -> Option<&'static str> {
    let is_path = |known: &str| path == known || known.ends_with('/') && path.starts_with(known);
    NOT_IMPLEMENTED.iter().find(|(known, _)| is_path(known)).map(|(_, why)| *why)
}

/// What a client should do instead of requesting `path`, which is not one of `routes`.
pub(in crate::api) fn instead<'a>(path: &str, routes: impl Iterator<Item = &'a str>) -> Cow<'static, str> {
    let asked = path.strip_suffix('/').unwrap_or(path);
    let bare = asked.strip_prefix("/v1").filter(|bare| !bare.is_empty());
    let is_asked = |known: &str| match known.strip_suffix('*') {
        Some(above) => [Some(asked), bare].iter().flatten().any(|asked| asked.starts_with(above)),
        None => asked == known || bare == Some(known),
    };
    if let Some((_, what)) = ELSEWHERE.iter().find(|(known, _)| known.iter().any(|known| is_asked(known))) {
        return Cow::Borrowed(what);
    }
    let Some(near) = nearest(path, routes) else {
        return Cow::Borrowed("GET /openapi.json lists the routes");
    };
    let before = path.strip_suffix(near).unwrap_or_default();
    let base_url = match path {
        _ if path.starts_with("/v1/v1/") => ": the client's base URL has one /v1 too many",
        _ if WITHOUT_V1.iter().any(|route| before.ends_with(route)) => {
            ": the client's base URL has a route at its end, and should end with /v1"
        }
        _ if path.contains("//") => ": the client's base URL has one / too many",
        _ => "",
    };
    format!("the nearest route is {near}{base_url}").into()
}

/// The route that was probably meant by `path`. Either `path` differs from the route by one or two letters, or it has
/// something before the route, for example because the base URL already has `/v1`.
fn nearest<'a>(path: &str, routes: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const NEAR: usize = 2;
    let (mut inner, mut near): (Option<&str>, Option<(usize, &str)>) = (None, None);
    for route in routes {
        if path.ends_with(route) && inner.is_none_or(|longest| longest.len() < route.len()) {
            inner = Some(route);
        }
        // The comparison takes the product of both lengths, and a path may have thousands of letters.
        if path.len().abs_diff(route.len()) <= NEAR {
            let distance = strsim::damerau_levenshtein(path, route);
            if distance <= NEAR && near.is_none_or(|(least, _)| distance < least) {
                near = Some((distance, route));
            }
        }
    }
    near.map(|(_, route)| route).or(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_route_is_the_end_of_the_path_or_differs_by_two_letters() {
        let routes = ["/v1/models", "/v1/chat/completions", "/v1/completions", "/models", "/health"];
        for (path, route) in [
            ("/v1/v1/chat/completions", Some("/v1/chat/completions")),
            ("/api/v1/models", Some("/v1/models")),
            ("/api/models", Some("/models")),
            ("/v1/models/", Some("/v1/models")),
            ("/v1/chat/completion", Some("/v1/chat/completions")),
            ("/v1/chta/completions", Some("/v1/chat/completions")),
            ("/V1/models", Some("/v1/models")),
            ("/healthz", Some("/health")),
            ("/v1", None),
            ("/v1/rerank", None),
            ("/xmodels", Some("/models")),
            ("/v1/chat", None),
            ("", None),
        ] {
            assert_eq!(nearest(path, routes.into_iter()), route, "{path}");
        }
        let long = format!("/{}", "x".repeat(1 << 20));
        assert_eq!(nearest(&long, routes.into_iter()), None);
    }
}

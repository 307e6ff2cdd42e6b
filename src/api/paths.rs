//! Paths beside those that the document names: routes without `/v1`, and the route that an unknown path is near to.

use std::borrow::Cow;

/// The paths that are answered with and without `/v1`, because some clients add no `/v1` to the base URL that their
/// user gave them. The document has each path once, with `/v1`. `GET /models` is no such path, but a route of
/// llama.cpp's that the document has.
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

/// The route that whoever asked for `path` probably meant. Either `path` differs from the route by a letter or two, or
/// it has something before the route, as after a base URL that has `/v1` already.
pub(in crate::api) fn nearest<'a>(path: &str, routes: impl Iterator<Item = &'a str>) -> Option<&'a str> {
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
    fn a_path_is_near_to_what_it_ends_with_or_misses_by_a_letter_or_two() {
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

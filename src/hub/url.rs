//! A URL, split into the parts that redirects need: the origin, which decides whether the token is sent, and the rest.

/// An `http` or `https` URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    /// Scheme, host and port, in lower case.
    origin: String,
    /// Path and query; empty or beginning with `/`.
    path: String,
}

impl Url {
    /// Parses a URL. The error text continues a sentence that begins with the source of the URL.
    pub fn parse(text: &str) -> Result<Self, String> {
        let problem = || format!("{text:?} is not a URL; expected one like https://huggingface.co");
        if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(problem());
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(problem)?;
        let scheme = scheme.to_ascii_lowercase();
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (host, path) = rest.split_at(end);
        // A user name before `@` could make the host look like another one.
        if !matches!(scheme.as_str(), "http" | "https") || host.is_empty() || host.contains(['@', '\\']) {
            return Err(problem());
        }
        let path = path.split('#').next().unwrap_or_default();
        let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
        Ok(Self { origin: format!("{scheme}://{}", host.to_ascii_lowercase()), path })
    }

    /// The URL with `path` appended; `path` is already encoded.
    pub fn join(&self, path: &str) -> Self {
        Self { origin: self.origin.clone(), path: format!("{}/{path}", self.path) }
    }

    /// The target of a redirect from this URL, by its `Location` header.
    pub fn redirected(&self, location: &str) -> Result<Self, String> {
        let target = if let Some(rest) = location.strip_prefix("//") {
            Self::parse(&format!("{}://{rest}", self.scheme()))?
        } else if location.starts_with('/') {
            Self::parse(&format!("{}{location}", self.origin))?
        } else {
            Self::parse(location)?
        };
        if self.scheme() == "https" && target.scheme() != "https" {
            return Err(format!("{} is not encrypted, but the request that led there was", target.origin));
        }
        Ok(target)
    }

    pub fn same_origin(&self, other: &Self) -> bool {
        self.origin == other.origin
    }

    /// The URL for messages, without its query, which may hold a signature.
    pub fn shown(&self) -> String {
        format!("{}{}", self.origin, self.path.split('?').next().unwrap_or_default())
    }

    pub fn origin(&self) -> &str {
        &self.origin
    }

    pub fn full(&self) -> String {
        format!("{}{}", self.origin, self.path)
    }

    /// Whether the host is this machine. Such a host is reached without a proxy.
    pub fn is_local(&self) -> bool {
        let host = self.origin.split("://").nth(1).unwrap_or_default();
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        host == "localhost" || host == "[::1]" || host.starts_with("127.")
    }

    fn scheme(&self) -> &str {
        self.origin.split(':').next().unwrap_or_default()
    }
}

/// Percent-encodes one segment of a path.
pub(super) fn encode(segment: &str) -> String {
    let mut out = String::with_capacity(segment.len());
    for byte in segment.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Percent-encodes the segments of a path, and keeps its slashes.
pub(super) fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}

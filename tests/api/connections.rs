//! Connections over TCP and TLS: how long a connection may be idle, how many there may be, how long a request head may
//! be, and which certificate the server shows.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use serde_json::json;
use unicorn::api::{self, AccessPolicy, Connections, Tls, TlsError};

use crate::support::app::{MODEL, OPTIONS, app_with_policy, endless};
use crate::support::fake_runner::HANG;
use crate::support::server::{CONNECTIONS, Serving, blocking, certificate, connect, read_answer};

const CHAT: &str = "/v1/chat/completions";

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

fn post(stream: bool) -> String {
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream})
        .to_string();
    format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// A new connection on which this was sent.
fn sent(address: SocketAddr, bytes: impl AsRef<[u8]>) -> TcpStream {
    let mut client = connect(address);
    client.write_all(bytes.as_ref()).expect("sent");
    client
}

/// Reads all bytes until the server closes the connection. Panics if it does not.
fn read_to_end(stream: &mut impl Read) -> String {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof) => {}
        Err(error) => panic!("not closed: {error}"),
    }
    String::from_utf8(all).expect("text")
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_make_no_progress_are_closed() {
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let address = serving.address;
    blocking(move || {
        // This client sends nothing at all.
        assert_eq!(read_to_end(&mut connect(address)), "");
        // This client sends, byte by byte, a request head that never ends.
        let head = format!("{}X-Slow: ", get("/health").trim_end());
        let mut slow = connect(address);
        let mut endless = head.bytes().chain(std::iter::repeat(b'a'));
        slow.set_read_timeout(Some(Duration::from_millis(20))).expect("set");
        let since = Instant::now();
        loop {
            assert!(since.elapsed() < HANG, "a slow head is accepted for too long");
            if slow.write_all(&[endless.next().expect("endless")]).is_err() {
                break;
            }
            match slow.read(&mut [0; 64]) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Ok(0) | Err(_) => break,
                Ok(_) => panic!("answered half a request"),
            }
        }
        // This client sends two requests, the second of them in two parts, and then nothing more.
        let mut idle = sent(address, get("/health"));
        assert!(read_answer(&mut idle).0.starts_with("http/1.1 200"));
        let second = get("/v1/models");
        idle.write_all(&second.as_bytes()[..20]).expect("sent");
        std::thread::sleep(Duration::from_millis(50));
        idle.write_all(&second.as_bytes()[20..]).expect("sent");
        assert!(read_answer(&mut idle).1.contains(MODEL));
        assert_eq!(read_to_end(&mut idle), "");
        // This client sends a complete request, and then a request head that never ends.
        let mut half = sent(address, get("/health"));
        read_answer(&mut half);
        half.write_all(b"GET /v1/mod").expect("sent");
        assert_eq!(read_to_end(&mut half), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_take_longer_than_the_idle_timeout() {
    let serving =
        Serving::start(app_with_policy(AccessPolicy::default(), "One, two, three"), CONNECTIONS).await;
    serving.app.control.allow(2);
    let (mut streaming, mut whole) = (serving.connect(), serving.connect());
    streaming.write_all(post(true).as_bytes()).expect("sent");
    whole.write_all(post(false).as_bytes()).expect("sent");
    // The answer takes longer than any of the timeouts. None of them counts while a request is being answered.
    tokio::time::sleep(2 * CONNECTIONS.idle_timeout).await;
    serving.app.control.release();
    blocking(move || {
        assert!(read_answer(&mut whole).1.contains("One, two, three"));
        let stream = read_to_end(&mut streaming);
        assert!(stream.contains("[DONE]"), "{stream}");
        // After the answer the connection is idle.
        assert_eq!(read_to_end(&mut whole), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_beyond_the_connection_limit_wait_and_are_served_later() {
    // Only other clients can make places free here, because the timeouts are too long for that.
    let connections = Connections { most: 4, head_timeout: 4 * HANG, idle_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), connections).await;
    // More silent clients connect than there are places. Two of the first clients have already sent a request.
    let mut silent: Vec<TcpStream> = (0..12).map(|_| serving.connect()).collect();
    for idle in &mut silent[..2] {
        idle.write_all(get("/health").as_bytes()).expect("sent");
    }
    let mut asking = sent(serving.address, get("/v1/models"));
    blocking(move || assert!(read_answer(&mut asking).1.contains(MODEL))).await;
    drop(silent);
    // As many clients connect as the kernel queues, and all are served.
    let clients: Vec<TcpStream> = (0..100).map(|_| serving.connect()).collect();
    blocking(move || {
        let ask = |mut client: TcpStream| {
            client
                .write_all(get("/health").replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").as_bytes())?;
            Ok::<_, io::Error>(read_to_end(&mut client))
        };
        for client in clients {
            assert!(ask(client).expect("sent").starts_with("HTTP/1.1 200"));
        }
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_heads_that_are_too_large_are_refused() {
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let (mut long, mut many) = (serving.connect(), serving.connect());
    blocking(move || {
        let head =
            get("/health").replace("\r\n\r\n", &format!("\r\nX-Long: {}\r\n\r\n", "a".repeat(500_000)));
        let _ = long.write_all(head.as_bytes());
        let answer = read_to_end(&mut long);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        let fields: String = (0..200).map(|i| format!("X-{i}: a\r\n")).collect();
        let head = get("/health").replace("\r\n\r\n", &format!("\r\n{fields}\r\n"));
        let _ = many.write_all(head.as_bytes());
        let answer = read_to_end(&mut many);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_finishes_answers_and_refuses_new_requests() {
    let app = endless();
    app.control.allow(12);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async {
        drop(stopped.await);
        4 * HANG
    };
    // No timeout closes a connection in this test.
    let long = 4 * HANG;
    let connections =
        Connections { head_timeout: long, idle_timeout: long, write_timeout: long, ..CONNECTIONS };
    let serving = tokio::spawn(api::serve(vec![listener], Arc::clone(&app.server), connections, shutdown));
    let (mut streaming, mut idle, seen) = blocking(move || {
        let mut streaming = sent(address, post(true));
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(":\"a\"") {
            let mut part = [0; 256];
            let n = streaming.read(&mut part).expect("text");
            assert!(n > 0, "closed after {:?}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&part[..n]);
        }
        let mut idle = sent(address, get("/live"));
        read_answer(&mut idle);
        (streaming, idle, seen)
    })
    .await;
    let ask = |request: String, address: SocketAddr| {
        blocking(move || {
            let mut late = sent(address, request);
            read_to_end(&mut late).to_ascii_lowercase()
        })
    };
    stop.send(()).expect("it runs");
    blocking(move || assert_eq!(read_to_end(&mut idle), "")).await;
    let health = ask(get("/health"), address).await;
    assert!(health.starts_with("http/1.1 503") && health.contains("draining"), "{health}");
    let live = ask(get("/live"), address).await;
    assert!(live.starts_with("http/1.1 200") && live.contains("connection: close"), "{live}");
    let refused = ask(post(false), address).await;
    for part in ["http/1.1 503", "retry-after: ", "connection: close", "shutting_down"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    app.control.release();
    let seen = String::from_utf8(seen).expect("text");
    let stream = blocking(move || seen + &read_to_end(&mut streaming)).await;
    assert!(stream.contains("data: [DONE]") && !stream.contains("error"), "{stream}");
    tokio::time::timeout(HANG, serving).await.expect("ends in time").expect("no panic");
}

/// What a client of HTTP/2 sends first: the preface, and an empty SETTINGS frame.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test(flavor = "multi_thread")]
async fn http_2_by_prior_knowledge_is_refused() {
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let address = serving.address;
    blocking(move || {
        for pieces in [&[HTTP_2][..], &[&HTTP_2[..3], &HTTP_2[3..]], &[HTTP_2, &[0; 4096]]] {
            let mut client = connect(address);
            for piece in pieces {
                client.write_all(piece).expect("sent");
                std::thread::sleep(Duration::from_millis(20));
            }
            client.shutdown(std::net::Shutdown::Write).expect("ended");
            let answer = read_to_end(&mut client);
            assert!(answer.starts_with("HTTP/1.1 505 ") && answer.contains("speaks HTTP/1.1"), "{answer}");
        }
        // A client that waits for the server's SETTINGS is disconnected.
        let mut client = sent(address, HTTP_2);
        assert!(read_to_end(&mut client).starts_with("HTTP/1.1 505 "));
    })
    .await;
    serving.end().await;
}

// --- TLS ------------------------------------------------------------------------------------------------

fn tls(folder: &Path) -> Result<Tls, String> {
    Tls::read(&folder.join("cert.pem"), &folder.join("key.pem")).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_served_with_a_certificate() {
    let (folder, cert) = certificate();
    let connections = Connections { tls: Some(tls(folder.path()).expect("sound")), ..CONNECTIONS };
    let serving =
        Serving::start(app_with_policy(AccessPolicy::default(), "One, two, three"), connections).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cert).expect("sound");
    let address = serving.address;
    for versions in [&[&rustls::version::TLS12][..], &[&rustls::version::TLS13]] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("known")
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let name = ServerName::try_from("localhost").expect("a name");
        let only_http_2 = Arc::new(config.clone());
        let session = rustls::ClientConnection::new(only_http_2, name.clone()).expect("a session");
        let mut client = rustls::StreamOwned::new(session, serving.connect());
        let refused = blocking(move || client.write_all(b"PRI").expect_err("no common protocol")).await;
        assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let session = rustls::ClientConnection::new(Arc::new(config), name).expect("a session");
        let mut client = rustls::StreamOwned::new(session, serving.connect());
        blocking(move || {
            client.write_all(get("/v1/models").as_bytes()).expect("sent");
            assert!(read_answer(&mut client).1.contains(MODEL));
            assert_eq!(client.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
            client.write_all(post(true).as_bytes()).expect("sent");
            assert!(read_to_end(&mut client).contains("[DONE]"));
        })
        .await;
    }
    blocking(move || {
        // A client that speaks plain HTTP gets an error that says so. A client that does not end the handshake is
        // disconnected.
        let mut plain = sent(address, get("/health"));
        let answer = read_to_end(&mut plain);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("https://"), "{answer}");
        let mut half = sent(address, [22_u8, 3, 1, 2, 0, 1]);
        assert_eq!(read_to_end(&mut half), "");
        assert_eq!(read_to_end(&mut connect(address)), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_shown_on_new_connections() {
    let (folder, first) = certificate();
    let (other, second) = certificate();
    let tls = tls(folder.path()).expect("sound");
    let connections = Connections { tls: Some(tls.clone()), ..CONNECTIONS };
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), connections).await;
    // Whether a client that trusts only this certificate accepts the server's.
    let proves = async |trusted: &rustls::pki_types::CertificateDer<'static>| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(trusted.clone()).expect("sound");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("known")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").expect("a name");
        let session = rustls::ClientConnection::new(Arc::new(config), name).expect("a session");
        let mut client = rustls::StreamOwned::new(session, serving.connect());
        blocking(move || {
            client.write_all(get("/v1/models").as_bytes()).is_ok()
                && read_answer(&mut client).1.contains(MODEL)
        })
        .await
    };
    assert!(proves(&first).await && !proves(&second).await);
    let reload = || -> Result<(), TlsError> {
        tls.renew(&Tls::read(&folder.path().join("cert.pem"), &folder.path().join("key.pem"))?);
        Ok(())
    };
    // Only one of the two files is new, so they do not match. The server refuses them and keeps its certificate.
    std::fs::copy(other.path().join("cert.pem"), folder.path().join("cert.pem")).expect("copied");
    assert!(reload().expect_err("not its key").to_string().contains("is not the key"));
    assert!(proves(&first).await);
    std::fs::copy(other.path().join("key.pem"), folder.path().join("key.pem")).expect("copied");
    reload().expect("sound");
    assert!(proves(&second).await && !proves(&first).await);
    serving.end().await;
}

#[test]
fn the_error_of_a_bad_certificate_or_key_names_its_file() {
    let (folder, _) = certificate();
    let path = folder.path();
    tls(path).expect("sound");
    let (cert, key) = (path.join("cert.pem"), path.join("key.pem"));
    let key_text = std::fs::read_to_string(&key).expect("read");
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let cert_text = std::fs::read_to_string(&cert).expect("read");
    let broken = cert_text.replace("-----END", "-----");
    for (file, text, parts) in [
        (&cert, key_text.as_str(), ["cert.pem", "no certificate"]),
        (&cert, "", ["cert.pem", "no certificate"]),
        (&cert, broken.as_str(), ["cert.pem", "PEM"]),
        (
            &cert,
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            ["cert.pem", "certificate"],
        ),
        (&key, cert_text.as_str(), ["key.pem", "no private key"]),
        (&key, &other.signing_key.serialize_pem(), ["key.pem", "is not the key"]),
        (
            &key,
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
            ["key.pem", "openssl"],
        ),
        (&key, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", ["key.pem", "key"]),
    ] {
        let sound = std::fs::read(file).expect("read");
        std::fs::write(file, text).expect("written");
        let error = tls(path).expect_err(parts[1]);
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        assert!(!error.contains('\n'), "{error:?}");
        std::fs::write(file, sound).expect("written");
    }
    std::fs::remove_file(&key).expect("removed");
    assert!(tls(path).expect_err("gone").contains("key.pem"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_with_a_too_large_content_length_is_refused_before_it_is_sent() {
    let serving = Serving::start(app_with_policy(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let address = serving.address;
    blocking(move || {
        let head = |length: &str, more: &str| {
            format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n")
        };
        let expects = "Expect: 100-continue\r\n";
        let too_long = OPTIONS.max_body_bytes + 1;
        // A client that waits for `100 Continue` gets only the refusal.
        let mut client = sent(address, head(&too_long.to_string(), expects));
        let all = read_to_end(&mut client);
        assert!(all.starts_with("HTTP/1.1 413 "), "{all}");
        let message = format!("the body is larger than {} bytes", OPTIONS.max_body_bytes);
        assert!(all.contains(&message) && !all.contains("100 Continue"), "{all}");
        // A client whose body is short enough gets `100 Continue`, and its answer.
        let body = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
        let mut client = sent(address, head(&body.len().to_string(), expects));
        let permission = b"HTTP/1.1 100 Continue\r\n\r\n";
        let mut first = vec![0; permission.len()];
        client.read_exact(&mut first).expect("read");
        assert_eq!(first, permission);
        client.write_all(body.as_bytes()).expect("sent");
        assert!(read_answer(&mut client).0.starts_with("http/1.1 200"));
        // A client that sends the body without waiting can still read the refusal.
        let mut client = sent(address, head(&too_long.to_string(), ""));
        client.write_all(&vec![b' '; too_long]).expect("sent");
        assert!(read_answer(&mut client).0.starts_with("http/1.1 413"));
        // The largest u64 lengths, two larger numbers, and a negative one.
        for (length, status) in [
            ("18446744073709551613", 413),
            ("18446744073709551614", 413),
            ("18446744073709551615", 413),
            ("18446744073709551616", 400),
            ("99999999999999999999999", 400),
            ("-1", 400),
        ] {
            let mut client = sent(address, head(length, expects));
            let all = read_to_end(&mut client);
            assert!(all.starts_with(&format!("HTTP/1.1 {status} ")), "{length}: {all}");
        }
    })
    .await;
    serving.end().await;
}

//! Connections over TCP and TLS: how long a connection may keep its place, how many there may be, how long a head may
//! be, and which certificate the server shows.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use serde_json::json;
use unicorn::api::{AccessPolicy, Connections, Tls, TlsError};

use crate::support::app::{MODEL, OPTIONS, app_behind};
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

/// All bytes that come until the server closes. Panics if the server does not close.
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
async fn who_keeps_a_connection_waiting_loses_it() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let address = serving.address;
    blocking(move || {
        // This client sends nothing at all.
        assert_eq!(read_to_end(&mut connect(address)), "");
        // This client sends a head that never ends, byte by byte.
        let head = format!("{}X-Slow: ", get("/health").trim_end());
        let mut slow = connect(address);
        let mut sent = head.bytes().chain(std::iter::repeat(b'a'));
        slow.set_read_timeout(Some(Duration::from_millis(20))).expect("set");
        let since = Instant::now();
        loop {
            assert!(since.elapsed() < HANG, "a slow head is never given up");
            if slow.write_all(&[sent.next().expect("endless")]).is_err() {
                break;
            }
            match slow.read(&mut [0; 64]) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Ok(0) | Err(_) => break,
                Ok(_) => panic!("answered half a request"),
            }
        }
        // This client sends two requests, the second in two parts, and then nothing more.
        let mut idle = connect(address);
        idle.write_all(get("/health").as_bytes()).expect("sent");
        assert!(read_answer(&mut idle).0.starts_with("http/1.1 200"));
        let second = get("/v1/models");
        idle.write_all(&second.as_bytes()[..20]).expect("sent");
        std::thread::sleep(Duration::from_millis(50));
        idle.write_all(&second.as_bytes()[20..]).expect("sent");
        assert!(read_answer(&mut idle).1.contains(MODEL));
        assert_eq!(read_to_end(&mut idle), "");
        // This client sends a second head that never ends, after a first one that did.
        let mut half = connect(address);
        half.write_all(get("/health").as_bytes()).expect("sent");
        read_answer(&mut half);
        half.write_all(b"GET /v1/mod").expect("sent");
        assert_eq!(read_to_end(&mut half), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_take_longer_than_silence_may() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "One, two, three"), CONNECTIONS).await;
    serving.app.control.allow(2);
    let (mut streaming, mut whole) = (serving.connect(), serving.connect());
    streaming.write_all(post(true).as_bytes()).expect("sent");
    whole.write_all(post(false).as_bytes()).expect("sent");
    // The answer takes longer than any of the timeouts: none of them is for a request that is being answered.
    tokio::time::sleep(2 * CONNECTIONS.idle_timeout).await;
    serving.app.control.release();
    blocking(move || {
        assert!(read_answer(&mut whole).1.contains("One, two, three"));
        let stream = read_to_end(&mut streaming);
        assert!(stream.contains("[DONE]"), "{stream}");
        // The connection is idle from then on.
        assert_eq!(read_to_end(&mut whole), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_waits_outside_and_is_served_when_it_is_its_turn() {
    // Other clients make places free here, and no timeout does.
    let connections = Connections { most: 4, head_timeout: 4 * HANG, idle_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), connections).await;
    // More clients connect than there are places, and say nothing. Two of the first have sent a request before.
    let mut silent: Vec<TcpStream> = (0..12).map(|_| serving.connect()).collect();
    for idle in &mut silent[..2] {
        idle.write_all(get("/health").as_bytes()).expect("sent");
    }
    let mut asking = serving.connect();
    asking.write_all(get("/v1/models").as_bytes()).expect("sent");
    blocking(move || assert!(read_answer(&mut asking).1.contains(MODEL))).await;
    drop(silent);
    // As many clients connect as the kernel lets wait, and all are served.
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
async fn heads_beyond_all_measure_are_refused() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), CONNECTIONS).await;
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

// --- TLS ------------------------------------------------------------------------------------------------

fn tls(folder: &Path) -> Result<Tls, String> {
    Tls::read(&folder.join("cert.pem"), &folder.join("key.pem")).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_spoken_with_a_certificate() {
    let (folder, cert) = certificate();
    let connections = Connections { tls: Some(tls(folder.path()).expect("sound")), ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "One, two, three"), connections).await;
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
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from("localhost").expect("a name");
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
        // A client that speaks plain HTTP is told so. A client that does not end the handshake loses its place.
        let mut plain = connect(address);
        plain.write_all(get("/health").as_bytes()).expect("sent");
        let answer = read_to_end(&mut plain);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("https://"), "{answer}");
        let mut half = connect(address);
        half.write_all(&[22, 3, 1, 2, 0, 1]).expect("sent");
        assert_eq!(read_to_end(&mut half), "");
        assert_eq!(read_to_end(&mut connect(address)), "");
    })
    .await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_shown_to_whoever_connects_then() {
    let (folder, first) = certificate();
    let (other, second) = certificate();
    let tls = tls(folder.path()).expect("sound");
    let connections = Connections { tls: Some(tls.clone()), ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), connections).await;
    // Whether the server proves its name to a client that trusts this certificate alone.
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
    // Half of the file is there. The server refuses it, and keeps its certificate.
    std::fs::copy(other.path().join("cert.pem"), folder.path().join("cert.pem")).expect("copied");
    assert!(reload().expect_err("not its key").to_string().contains("is not the key"));
    assert!(proves(&first).await);
    std::fs::copy(other.path().join("key.pem"), folder.path().join("key.pem")).expect("copied");
    reload().expect("sound");
    assert!(proves(&second).await && !proves(&first).await);
    serving.end().await;
}

#[test]
fn a_certificate_that_will_not_do_is_named_with_its_file() {
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
async fn a_body_that_is_too_long_is_refused_by_its_announced_length() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), CONNECTIONS).await;
    let address = serving.address;
    blocking(move || {
        let head = |length: &str, more: &str| {
            format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n")
        };
        let expects = "Expect: 100-continue\r\n";
        let too_long = OPTIONS.max_body_bytes + 1;
        // A client that waits for leave to send gets the refusal and nothing else.
        let mut client = connect(address);
        client.write_all(head(&too_long.to_string(), expects).as_bytes()).expect("sent");
        let all = read_to_end(&mut client);
        assert!(all.starts_with("HTTP/1.1 413 "), "{all}");
        let message = format!("the body is larger than {} bytes", OPTIONS.max_body_bytes);
        assert!(all.contains(&message) && !all.contains("100 Continue"), "{all}");
        // A client that gets leave is answered.
        let body = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
        let mut client = connect(address);
        client.write_all(head(&body.len().to_string(), expects).as_bytes()).expect("sent");
        let leave = b"HTTP/1.1 100 Continue\r\n\r\n";
        let mut first = vec![0; leave.len()];
        client.read_exact(&mut first).expect("read");
        assert_eq!(first, leave);
        client.write_all(body.as_bytes()).expect("sent");
        assert!(read_answer(&mut client).0.starts_with("http/1.1 200"));
        // A client that sends all the same reads the answer.
        let mut client = connect(address);
        client.write_all(head(&too_long.to_string(), "").as_bytes()).expect("sent");
        client.write_all(&vec![b' '; too_long]).expect("sent");
        assert!(read_answer(&mut client).0.starts_with("http/1.1 413"));
        // The largest lengths there are, and one that is none.
        for (length, status) in [
            ("18446744073709551613", 413),
            ("18446744073709551614", 413),
            ("18446744073709551615", 413),
            ("18446744073709551616", 400),
            ("99999999999999999999999", 400),
            ("-1", 400),
        ] {
            let mut client = connect(address);
            client.write_all(head(length, expects).as_bytes()).expect("sent");
            let all = read_to_end(&mut client);
            assert!(all.starts_with(&format!("HTTP/1.1 {status} ")), "{length}: {all}");
        }
    })
    .await;
    serving.end().await;
}

//! `unicorn serve` as a systemd service: notifications and inherited sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::support::daemon::Daemon;
use crate::support::fake_runner::HANG;
use crate::support::systemd::{Systemd, hand_over};

#[test]
fn systemd_is_notified_of_the_load_of_health_and_of_the_stop() {
    let systemd = Systemd::new();
    let mut server = Daemon::start_as(&[], |command| systemd.supervise(command, Duration::from_secs(3)));
    let told = systemd.wait_for("READY=1");
    server.line("self-test ");
    let (ready, loading) = told.split_last().expect("a message");
    assert!(ready.contains("STATUS=a/b at http://"), "{ready}");
    assert!(
        !loading.is_empty() && !loading.iter().any(|message| message.contains("WATCHDOG")),
        "{loading:#?}"
    );
    for message in loading {
        assert!(
            message.contains("EXTEND_TIMEOUT_USEC=30000000") && message.contains("STATUS=loading a/b"),
            "{message}"
        );
    }
    // A step counts as a sign of life for five seconds. Later notifications need a probe.
    for _ in 0..9 {
        assert_eq!(systemd.wait_for("WATCHDOG=1").len(), 1);
    }
    assert_eq!(server.ask(&[], false).0, 200);
    systemd.wait_for("WATCHDOG=1");
    server.signal("TERM");
    systemd.wait_for("STOPPING=1");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_systemd_socket_serves_clients_that_connected_before_the_start() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let mut early = TcpStream::connect(address).expect("connects");
    early.set_read_timeout(Some(HANG)).expect("set");
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}"#;
    let head = format!("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n", body.len());
    early.write_all([&head, body].concat().as_bytes()).expect("sent");
    // The address of the options is not used.
    let mut server = Daemon::start_as(&["--host", "192.0.2.1"], |command| hand_over(listener, command));
    assert_eq!(server.url(), format!("http://{address}/v1"));
    let mut reply = String::new();
    early.read_to_string(&mut reply).expect("answered");
    assert!(
        reply.starts_with("HTTP/1.0 200") && reply.contains("chat.completion"),
        "the early client must wait for the model: {reply}"
    );
    assert_eq!(server.ask(&[], false).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

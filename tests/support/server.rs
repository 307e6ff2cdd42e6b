//! An app that listens on a port, with limits for connections, a certificate, and reports of a fake device.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use unicorn::api::{self, Connections};
use unicorn::device::{
    DeviceReport, DeviceState, HeapReport, KernelTime, NpuReport, Place, Placed, SelfTested,
};
use unicorn::library::{CourtesyReport, EnergyReport, LiveReport, ModelReport};
use unicorn::npu::account;

use super::app::App;
use super::fake_runner::HANG;

/// Timeouts so short that tests can reach them, but longer than a thread waits on a busy machine.
pub const CONNECTIONS: Connections = Connections {
    most: 64,
    head_timeout: Duration::from_millis(2000),
    idle_timeout: Duration::from_millis(2500),
    write_timeout: Duration::from_millis(2000),
    tls: None,
};

/// A server that listens on a free port.
pub struct Serving {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
    pub app: App,
}

impl Serving {
    pub async fn start(app: App, connections: Connections) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            drop(stopped.await);
            Duration::ZERO
        };
        let task = api::serve(vec![listener], Arc::clone(&app.server), connections, shutdown);
        Self { address, stop: Some(stop), task: tokio::spawn(task), app }
    }

    pub fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    /// A connection with a small receive buffer, so that an unread answer stays with the server.
    pub fn connect_with_small_buffer(&self) -> TcpStream {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM, None).expect("a socket");
        socket.set_recv_buffer_size(4096).expect("set");
        socket.connect(&self.address.into()).expect("connects");
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(HANG)).expect("set");
        stream
    }

    pub async fn end(mut self) {
        self.app.control.release();
        let _ = self.stop.take().expect("it was not ended before").send(());
        tokio::time::timeout(HANG, self.task).await.expect("ends in time").expect("without a panic");
    }
}

/// A connection whose reads fail after [`HANG`].
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connects");
    stream.set_read_timeout(Some(HANG)).expect("set");
    stream
}

/// Reads the head of an answer and a body of `Content-Length` bytes.
pub fn read_answer(stream: &mut impl Read) -> (String, String) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("a whole head");
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
    let mut body = vec![0; length.expect("a length").parse().expect("a number")];
    stream.read_exact(&mut body).expect("a whole body");
    (head, String::from_utf8(body).expect("text"))
}

/// Runs blocking code on another thread, so that the runtime continues.
pub async fn blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::time::timeout(2 * HANG, tokio::task::spawn_blocking(run))
        .await
        .expect("no hang")
        .expect("no panic")
}

/// A folder with `cert.pem` and `key.pem` for localhost.
pub fn certificate() -> (TempDir, rustls::pki_types::CertificateDer<'static>) {
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("cert.pem"), signed.cert.pem()).expect("written");
    std::fs::write(folder.path().join("key.pem"), signed.signing_key.serialize_pem()).expect("written");
    (folder, signed.cert.der().clone())
}

/// The report of a device that does not exist.
pub fn report() -> ModelReport {
    let placed =
        |class: &str, heap: &str, bytes| Placed { class: class.into(), heap: heap.into(), buffers: 1, bytes };
    let device = DeviceReport {
        device: "a \"device\"".into(),
        driver: "a driver".into(),
        place: Place::default(),
        layers: 6,
        draft_layers: Some(2),
        weights: "none".into(),
        kv_dtype: "f16".into(),
        kv_dtype_why: None,
        placements: vec![placed("KV cache", "heap 0", 7), placed("norms", "heap \"1\"", 9)],
        usable_bytes: 90 << 30,
        residency: "confirmed".into(),
        self_test: SelfTested { kernels: 21, layers: Some(6), seconds: 0.5 },
        hang_timeout: Duration::MAX,
        npu: None,
    };
    let live = || {
        let ms = Duration::from_millis;
        let state = DeviceState {
            heaps: vec![HeapReport {
                heap: "heap 0".into(),
                size_bytes: 23,
                free_bytes: 9,
                read_bytes_per_s: Some(70_000_000_000),
            }],
            vram: Some(11),
            processor: ms(2500),
            dispatches: 3,
            copies: 5,
            barriers: 4,
            memory_shortages: 6,
            busy: Some(ms(750)),
            rested: ms(250),
            declared: vec![("norms".into(), 17)],
            kernels: vec![KernelTime { kernel: "matmul".into(), dispatches: 2, time: ms(500) }],
            ..DeviceState::default()
        };
        let npu = NpuReport {
            mode: "auto".into(),
            in_use: true,
            device: Some("RyzenAI-npu1".into()),
            xrt: Some("2.25.0".into()),
            kv_heads: 2,
            completed: 12,
            tokens: 3072,
            fallbacks: [("npu-timeout".to_owned(), 1)].into(),
            waited_s: 0.5,
            ..NpuReport::default()
        };
        LiveReport {
            device: Some(state),
            resident: Some(13),
            processor: ms(1500),
            open_files: Some(31),
            most_files: None,
            courtesy: Some(CourtesyReport { share: 0.5, holds: true, sessions_known: true }),
            energy: Some(EnergyReport { source: "rapl", joules: 37.5 }),
            metrics: account::metrics(Some(&npu)),
            npu: Some(npu),
        }
    };
    ModelReport { device, live: Box::new(live) }
}

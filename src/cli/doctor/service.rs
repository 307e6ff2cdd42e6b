//! Checks of what a server needs besides its GPU: free ports, files of keys and certificates, a folder for conversations,
//! and processors that are not throttled.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::finding::Finding;
use super::machine::Machine;
use crate::cli::error::Error;
use crate::cli::serve;
use crate::config::{self, Config};
use crate::kv_disk::check_folder;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// The folder in which systemd has a link to each enabled socket unit.
const SOCKETS: &str = "etc/systemd/system/sockets.target.wants";

pub fn check(machine: &Machine, config: &Config) -> Vec<Finding> {
    let config::Server { port: main, ollama_port, .. } = config.server;
    let mut findings = vec![port(machine, config, main, "--port selects another port")];
    let second = "server.ollama_port selects another port; 0 = no second port";
    findings.extend(ollama_port.map(|number| port(machine, config, number, second)));
    findings.extend(options_of_server(machine, &config.server));
    findings.extend(conversations(machine, &config.kv_disk));
    findings.push(governor(machine));
    findings
}

/// What a user can do about a file or a folder that only the service may read.
const AS_SERVICE: &str = "check it as that service's user: sudo -u unicorn unicorn doctor";

/// The files of API keys and of the certificate, and the other options that a server checks before it listens. `None` =
/// no file is configured, and nothing is wrong.
fn options_of_server(machine: &Machine, options: &config::Server) -> Option<Finding> {
    let config::Server { api_key_file, tls_cert, tls_key, .. } = options;
    let files: Vec<&str> =
        [api_key_file, tls_cert, tls_key].into_iter().flatten().map(String::as_str).collect();
    let files = files.join(", ");
    if machine.is_redirected() {
        let found =
            format!("unknown: whether {files} can be read; only a doctor on that machine can check it");
        return (!files.is_empty()).then(|| Finding::note("server-options-unread", found));
    }
    // Without addresses: systemd may give the service its keys at the start, so that missing keys are no problem here.
    match serve::check(options, &[]) {
        Ok(_) if files.is_empty() => None,
        Ok(_) => Some(Finding::ok("server-options", format!("{files} can be used"))),
        Err(error) => Some(
            Finding::problem("server-options-unusable", error.to_string())
                .act(&format!("if a service uses the file that is named, {AS_SERVICE}")),
        ),
    }
}

/// The folder of conversations, if there is one.
fn conversations(machine: &Machine, options: &config::KvDisk) -> Option<Finding> {
    let path = options.path.as_deref()?;
    if machine.is_redirected() {
        let found =
            format!("unknown: whether {path} can be used; only a doctor on that machine can check it");
        return Some(Finding::note("kv-disk-unread", found));
    }
    Some(match check_folder(path.as_ref()) {
        Ok(()) => Finding::ok("kv-disk", format!("conversations can be kept in {path}")),
        Err(error) => Finding::problem("kv-disk-unusable", Error::from(error).to_string())
            .act(&format!("if a service uses the folder, {AS_SERVICE}")),
    })
}

/// Whether the server can listen on a port. `option` selects another one.
fn port(machine: &Machine, config: &Config, port: u16, option: &str) -> Finding {
    const TABLES: [&str; 2] = ["proc/net/tcp", "proc/net/tcp6"];
    let host = config.server.host.as_str();
    let address = match host {
        "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        host => host.parse().ok(),
    };
    let mut taken = false;
    for (i, table) in TABLES.iter().enumerate() {
        match machine.read(table) {
            Ok(text) => {
                taken |= text.lines().filter_map(listener).any(|(ip, at)| at == port && clashes(ip, address))
            }
            // A kernel without IPv6 has no second table.
            Err(error) if i == 0 => return Finding::unread("port", table, &error),
            Err(_) => {}
        }
    }
    if !taken || port == 0 {
        return Finding::ok("port", format!("port {port} of {host} is free")).read_from(TABLES[0]);
    }
    if port == config.server.port && !machine.names(SOCKETS, "unicorn.socket").is_empty() {
        return Finding::note(
            "already-serving",
            format!("systemd listens on port {port} for unicorn.socket"),
        )
        .cause("the socket is enabled: systemd starts the service when the first client connects")
        .command("systemctl status unicorn.socket unicorn.service")
        .read_from(SOCKETS);
    }
    if serves(machine) {
        return Finding::note(
            "already-serving",
            format!("port {port} is in use, and a `unicorn serve` is running"),
        )
        .cause("if that server uses the port, no second one is needed")
        .command(format!("curl http://127.0.0.1:{port}/health"))
        .read_from(TABLES[0]);
    }
    Finding::problem("port-taken", format!("port {port} of {host} is in use"))
        .cause("another program listens on it")
        .command(format!("sudo ss -ltnp 'sport = :{port}'"))
        .option(option)
        .read_from(TABLES[0])
}

/// The address and port of a line of `/proc/net/tcp`; `None` if it is not a listening socket.
fn listener(line: &str) -> Option<(IpAddr, u16)> {
    let mut fields = line.split_whitespace().skip(1);
    let (ip, port) = fields.next()?.split_once(':')?;
    if fields.nth(1)? != LISTEN {
        return None;
    }
    // Addresses are 32-bit words in the byte order of the machine.
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_le_bytes);
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for i in 0..4 {
                bytes[4 * i..4 * i + 4].copy_from_slice(&word(8 * i)?);
            }
            IpAddr::from(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some((ip, u16::from_str_radix(port, 16).ok()?))
}

/// Whether a listener on `ip` prevents a server from listening on `address`. `None` (a host name) conflicts with every
/// listener.
fn clashes(ip: IpAddr, address: Option<IpAddr>) -> bool {
    address.is_none_or(|address| ip == address || ip.is_unspecified() || address.is_unspecified())
}

/// Whether a `unicorn serve` process is running.
fn serves(machine: &Machine) -> bool {
    machine.names("proc", "").iter().filter(|name| name.bytes().all(|b| b.is_ascii_digit())).any(|pid| {
        let is_ours = machine.read(&format!("proc/{pid}/comm")).is_ok_and(|name| name == "unicorn");
        is_ours
            && machine
                .read(&format!("proc/{pid}/cmdline"))
                .is_ok_and(|line| line.split('\0').any(|arg| arg == "serve"))
    })
}

fn governor(machine: &Machine) -> Finding {
    const FOLDER: &str = "sys/devices/system/cpu/cpufreq";
    let Some(policy) = machine.names(FOLDER, "policy").into_iter().next() else {
        return Finding::ok("governor", "the kernel does not control the processor frequency here");
    };
    let path = |name: &str| format!("{FOLDER}/{policy}/{name}");
    let read = |name: &str| machine.read(&path(name)).unwrap_or_default();
    let governor = match machine.read(&path("scaling_governor")) {
        Ok(governor) => governor,
        Err(error) => return Finding::unread("governor", &path("scaling_governor"), &error),
    };
    let (driver, preference) = (read("scaling_driver"), read("energy_performance_preference"));
    // With these drivers, `powersave` lets the hardware choose the frequency, guided by the energy preference.
    let hardware_chooses = matches!(driver.as_str(), "amd-pstate-epp" | "intel_pstate");
    let found = format!("governor {governor} of {driver}");
    let set = |finding: Finding, name: &str, value: &str| {
        finding.command(format!("echo {value} | sudo tee /{FOLDER}/policy*/{name}")).read_from(&path(name))
    };
    if governor == "powersave" && !hardware_chooses {
        let finding = Finding::warning("governor-powersave", found)
            .cause("the processors stay at their lowest frequency, which slows every token down");
        let has_schedutil = read("scaling_available_governors").split_whitespace().any(|g| g == "schedutil");
        return set(finding, "scaling_governor", if has_schedutil { "schedutil" } else { "performance" });
    }
    if hardware_chooses && preference == "power" {
        let finding = Finding::warning("governor-powersave", format!("{found}, preference {preference}"))
            .cause("the preference `power` keeps the processors slow, which slows every token down");
        return set(finding, "energy_performance_preference", "balance_performance");
    }
    Finding::ok("governor", found)
}

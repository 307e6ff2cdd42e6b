//! The binary from outside: commands, options, configuration, the daemon and its service.

mod bench;
mod commands;
mod config;
mod daemon;
mod doctor;
mod families;
mod images;
mod kv_disk;
mod library;
mod options;
mod systemd;

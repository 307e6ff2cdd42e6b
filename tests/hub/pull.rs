//! Pulls models from a hub server in this file, which can simulate faults, and finds, lists and removes pulled models.
//! The tests use no network outside this machine.

use std::ffi::OsString;
use std::fs;

use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use axum::body::Bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use unicorn::hub::{Cache, Format, HubError, ModelName, Settings, pull, standard_cache};

use crate::support::checkpoints::sha256;
use crate::support::data;
use crate::support::hub::{COMMIT, Fault, Hub, at_home, git_sha1, pull_with, tiny_gemma};
use crate::support::program::{in_shell, output, printed, printed_json, unicorn_on_software};
use crate::support::waits::wait_until;

const OTHER_COMMIT: &str = "fedcba9876543210fedcba9876543210fedcba98";

// --- shared helpers ---------------------------------------------------------------------------------------------

/// Random bytes.
fn noise(n: usize) -> Vec<u8> {
    let seed = 0x5eed;
    println!("seed {seed:#x}");
    let mut bytes = vec![0; n];
    ChaCha8Rng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

fn temporary() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::of_user(folder.path().join("hub"));
    (folder, cache)
}

fn name(text: &str) -> ModelName {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn find(cache: &Cache, text: &str) -> Option<PathBuf> {
    cache.find(&name(text)).expect("valid")
}

fn repository(cache: &Cache) -> PathBuf {
    cache.root().join("models--org--tiny")
}

/// The sorted names of the files in a folder, which may be absent.
fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn blobs(cache: &Cache) -> Vec<String> {
    names_in(&repository(cache).join("blobs"))
}

/// Checks that the message is one line with all of `parts`.
#[track_caller]
fn says(error: &HubError, parts: &[&str]) {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message:?}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

// --- names ------------------------------------------------------------------------------------------------------

#[test]
fn model_names_are_parsed_and_displayed_as_typed() {
    for text in ["google/gemma-3-27b-it", "a/b@v1.0", "a/b@refs/pr/3:sub/x.gguf", "a/b:Q4_K_M"] {
        assert_eq!(name(text).to_string(), text);
    }
    let full = name("org/tiny@v1:a.gguf");
    assert_eq!(
        (full.repo.as_str(), full.repo.name(), full.revision(), full.file.as_deref()),
        ("org/tiny", "tiny", "v1", Some("a.gguf"))
    );
    let bad = "|tiny|/tiny|org/|org/a/b|../etc|org/..|./models|org/-x|org/a--b|a b/c|org/tiny@|org/tiny@../x\
               |org/tiny@a//b|org/tiny@-rf|org/tiny:|org/tiny:../x|org/tiny:/etc/passwd|org/tiny:a\\b\
               |org/tiny:a\nb|http://org/tiny";
    for bad in bad.split('|') {
        let error = bad.parse::<ModelName>().expect_err(bad);
        says(&error.into(), &["expected"][..usize::from(!bad.contains(':'))]);
    }
}

#[test]
fn environment_variables_are_read_as_other_hugging_face_tools_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path().to_str().expect("UTF-8");
    let with = |pairs: &[(&str, &str)]| {
        let pairs: Vec<(String, OsString)> = pairs.iter().map(|(k, v)| ((*k).to_owned(), v.into())).collect();
        move |name: &str| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone())
    };
    let cache = |pairs: &[(&str, &str)]| standard_cache(with(pairs)).map(|p| p.display().to_string());
    assert_eq!(cache(&[]), None);
    assert_eq!(cache(&[("HOME", "/h")]).as_deref(), Some("/h/.cache/huggingface/hub"));
    assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).as_deref(), Some("/x/huggingface/hub"));
    assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/hf")]).as_deref(), Some("/h/hf/hub"));
    assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]).as_deref(), Some("/c"));

    // Another test checks which token the server receives. This test checks that debug output does not contain it.
    for (pairs, origin) in [
        (&[("HF_TOKEN", "hf_secret"), ("HUGGING_FACE_HUB_TOKEN", "hf_other")][..], "HF_TOKEN"),
        (&[("HF_TOKEN", " "), ("HUGGING_FACE_HUB_TOKEN", "hf_secret")], "HUGGING_FACE_HUB_TOKEN"),
    ] {
        let settings = format!("{:?}", Settings::from_environment(with(pairs)).expect("valid"));
        assert!(settings.contains(origin) && !settings.contains("hf_"), "{settings}");
    }
    fs::create_dir(folder.path().join("hf")).expect("made");
    fs::write(folder.path().join("hf/token"), "hf_secret\n").expect("written");
    let settings = Settings::from_environment(with(&[("HOME", home), ("HF_HOME", "~/hf")])).expect("valid");
    assert!(format!("{settings:?}").contains("hf/token"), "{settings:?}");

    for (pairs, part) in [
        (("HF_ENDPOINT", "huggingface.co"), "HF_ENDPOINT"),
        (("HF_ENDPOINT", "https://hub@evil.example"), "HF_ENDPOINT"),
        (("HF_TOKEN", "hf_se\u{7f}cret"), "HF_TOKEN"),
        (("HF_TOKEN_PATH", home), "token"),
    ] {
        let error = Settings::from_environment(with(&[pairs])).expect_err(part);
        says(&error, &[part]);
        assert!(!error.to_string().contains("hf_se"), "{error}");
    }
}

// --- pulling ----------------------------------------------------------------------------------------------------

#[test]
fn a_pull_stores_only_files_for_serving_in_the_shared_cache_layout() {
    let weights = noise(300_000);
    let hub = Hub::start(&[
        ("config.json", b"hello\n", false),
        ("tokenizer.json", b"{\"a\": 1}", true),
        ("chat_template.jinja", b"{{ x }}", false),
        ("model.safetensors", &weights, true),
        ("pytorch_model.bin", b"runs code", true),
        ("original/model.safetensors", b"another format", true),
        ("README.md", b"# Tiny", false),
        ("adapter_model.safetensors", b"not weights of its own", true),
    ]);
    let (_folder, cache) = temporary();
    let path = hub.pull(&cache, "org/tiny").expect("pulled");
    assert_eq!(path, repository(&cache).join("snapshots").join(COMMIT));
    assert_eq!(
        names_in(&path),
        ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    );
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    // The checksum that `git hash-object` prints.
    let link = fs::read_link(path.join("config.json")).expect("a link");
    assert_eq!(link, Path::new("../../blobs/ce013625030ba8dba906f756967f9e9ca394464a"));
    let link = fs::read_link(path.join("model.safetensors")).expect("a link");
    assert_eq!(link, Path::new("../../blobs").join(sha256(&weights)));
    assert_eq!(fs::read_to_string(repository(&cache).join("refs/main")).unwrap(), COMMIT);
    let left = blobs(&cache);
    assert!(left.iter().all(|b| !b.contains('.')), "only complete blobs are left: {left:?}");
    assert_eq!(find(&cache, "org/tiny").as_ref(), Some(&path));

    // A second pull requests only the listing.
    hub.hub_requests();
    hub.cdn_requests();
    assert_eq!(hub.pull(&cache, "org/tiny").expect("here"), path);
    let asked = hub.hub_requests();
    assert!(asked.len() == 1 && asked[0].path.starts_with("/api/models/org/tiny/revision/main"), "{asked:?}");
    assert!(hub.cdn_requests().is_empty());

    // A tag is another name of the same commit. A new commit reuses the blobs of unchanged files.
    hub.pull(&cache, "org/tiny@v1").expect("pulled");
    assert_eq!(fs::read_to_string(repository(&cache).join("refs/v1")).unwrap(), COMMIT);
    hub.set(|b| {
        b.commit = OTHER_COMMIT.into();
        b.files[0].bytes = Bytes::from_static(b"hello again\n");
    });
    hub.hub_requests();
    let newer = hub.pull(&cache, "org/tiny").expect("pulled");
    assert!(newer.ends_with(OTHER_COMMIT) && hub.cdn_requests().is_empty());
    assert_eq!(find(&cache, "org/tiny").as_ref(), Some(&newer));
    assert_eq!(find(&cache, "org/tiny@v1").as_ref(), Some(&path));
    assert_eq!(find(&cache, "org/tiny@v2"), None);
    assert_eq!(find(&cache, "org/other"), None);
}

#[test]
fn a_tag_selects_one_of_several_gguf_files() {
    let hub = Hub::start(&[
        ("tiny-Q4_0.gguf", b"q4_0", true),
        ("tiny-UD-Q4_K_M.gguf", b"ud", true),
        ("tiny-Q4_K_M.gguf", b"q4_k_m", true),
        ("bf16/tiny-bf16-00001-of-00002.gguf", b"first part", true),
        ("bf16/tiny-bf16-00002-of-00002.gguf", b"second", true),
        ("f32/tiny-f32-00001-of-00002.gguf", b"the other is not there", true),
        ("mmproj-tiny-f16.gguf", b"eyes", true),
        ("config.json", b"{}", false),
    ]);
    let (_folder, cache) = temporary();
    let choices = |result: Result<PathBuf, HubError>| match result {
        Err(HubError::Choose { files, .. }) => files.into_vec(),
        other => panic!("{other:?}"),
    };
    let all = choices(hub.pull(&cache, "org/tiny"));
    assert_eq!(all.len(), 4, "{all:?}");
    assert!(all.contains(&("bf16/tiny-bf16-00001-of-00002.gguf".into(), Some(16))), "{all:?}");
    assert!(
        all.contains(&("tiny-Q4_0.gguf".into(), Some(4))) && !all.iter().any(|(f, _)| f.contains("mmproj"))
    );
    assert_eq!(choices(hub.pull(&cache, "org/tiny:q4_k_m")).len(), 2);
    assert_eq!(choices(hub.pull(&cache, "org/tiny:Q5_0")).len(), 4);
    says(&hub.pull(&cache, "org/tiny:Q5_0").unwrap_err(), &["Q5_0", "org/tiny:tiny-Q4_0.gguf"]);
    assert!(!cache.root().exists(), "a refused pull writes nothing");

    let q4_0 = hub.pull(&cache, "org/tiny:q4_0").expect("pulled");
    assert!(q4_0.ends_with("tiny-Q4_0.gguf") && fs::read(&q4_0).unwrap() == b"q4_0");
    let found = |text: &str| find(&cache, text);
    assert_eq!(found("org/tiny").as_ref(), Some(&q4_0), "the only pulled file");
    assert_eq!(found("org/tiny:tiny-Q4_0.gguf").as_ref(), Some(&q4_0));
    assert_eq!(found("org/tiny:Q4_0").as_ref(), Some(&q4_0));
    assert_eq!(found("org/tiny:Q4_K_M"), None, "on the hub, but not pulled");
    hub.pull(&cache, "org/tiny:tiny-Q4_K_M.gguf").expect("pulled");
    assert_eq!(found("org/tiny:Q4_0").as_ref(), Some(&q4_0));
    says(&cache.find(&name("org/tiny")).unwrap_err(), &["2", "org/tiny:tiny-Q4_0.gguf"]);

    // A split file is one model: the name of any part pulls all parts, and the path of the first part is returned.
    for text in ["org/tiny:BF16", "org/tiny:bf16/tiny-bf16-00002-of-00002.gguf"] {
        let (_folder, cache) = temporary();
        let path = hub.pull(&cache, text).expect("pulled");
        assert!(path.ends_with("bf16/tiny-bf16-00001-of-00002.gguf") && path.exists());
        assert_eq!(fs::read(path.with_file_name("tiny-bf16-00002-of-00002.gguf")).unwrap(), b"second");
        assert_eq!(find(&cache, text).as_ref(), Some(&path));
        assert_eq!(
            listed(&cache),
            [("org/tiny:bf16/tiny-bf16-00001-of-00002.gguf".to_owned(), Format::Gguf, 16)]
        );
        fs::remove_file(path.with_file_name("tiny-bf16-00002-of-00002.gguf")).expect("removed");
        says(&cache.find(&name("org/tiny")).unwrap_err(), &["partly downloaded"]);
        assert_eq!(listed(&cache), [("org/tiny".to_owned(), Format::Partial, 10)]);
    }

    // The name may be omitted if there is only one file.
    hub.set(|b| b.files.retain(|f| f.path == "tiny-Q4_0.gguf" || f.path.starts_with("mmproj")));
    assert!(hub.pull(&cache, "org/tiny").expect("pulled").ends_with("tiny-Q4_0.gguf"));
    hub.set(|b| b.files.retain(|f| f.path.starts_with("mmproj")));
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["no files that can be served", "gguf"]);
    says(&hub.pull(&cache, "org/tiny:none.txt").unwrap_err(), &["org/tiny", "none.txt"]);
}

#[test]
fn a_gguf_file_is_pulled_and_removed_with_its_vision_tower() {
    let hub = Hub::start(&[
        ("tiny-Q4_0.gguf", b"four", true),
        ("tiny-Q8_0.gguf", b"eightbit", true),
        ("mmproj-Q8_0.gguf", b"q8_0 eyes", true),
        ("mmproj-BF16.gguf", b"bf16 eyes!", true),
        ("mmproj-F16.gguf", b"f16 eyes", true),
        ("big/tiny-bf16-00001-of-00002.gguf", b"one", true),
        ("big/tiny-bf16-00002-of-00002.gguf", b"two", true),
        ("big/tiny.mmproj-f32.gguf", b"f32 eyes in big", true),
        ("blind/tiny-Q2_K.gguf", b"two bits", true),
    ]);
    for (tag, files) in [
        ("Q4_0", &["mmproj-F16.gguf", "tiny-Q4_0.gguf"][..]),
        ("bf16", &["tiny-bf16-00001-of-00002.gguf", "tiny-bf16-00002-of-00002.gguf", "tiny.mmproj-f32.gguf"]),
        ("Q2_K", &["tiny-Q2_K.gguf"]),
    ] {
        let (_folder, cache) = temporary();
        let path = hub.pull(&cache, &format!("org/tiny:{tag}")).expect("pulled");
        assert_eq!(names_in(path.parent().expect("a folder")), files, "{tag}");
        assert_eq!(find(&cache, "org/tiny").as_ref(), Some(&path), "a tower is no model of its own");
        let files = unicorn::model::arch::open_files(&path).expect("a model");
        let tower = files.tower().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        assert_eq!(tower.is_some(), tag != "Q2_K", "{tower:?}");
    }

    // The tower stays for the other file, and goes with the last one.
    let (_folder, cache) = temporary();
    let paths = ["Q4_0", "Q8_0"].map(|tag| hub.pull(&cache, &format!("org/tiny:{tag}")).expect("pulled"));
    let snapshot = paths[0].parent().expect("a folder");
    let sizes: Vec<u64> = listed(&cache).into_iter().map(|(_, _, bytes)| bytes).collect();
    assert_eq!(sizes, [4 + 8, 8 + 8], "each file with its tower");
    for (file, left, freed) in [("Q4_0", &["mmproj-F16.gguf", "tiny-Q8_0.gguf"][..], 4), ("Q8_0", &[], 16)] {
        let removal = cache.removal(&name(&format!("org/tiny:{file}"))).expect("valid").expect("something");
        assert_eq!(removal.bytes, freed, "{file}");
        removal.apply().expect("removed");
        assert_eq!(names_in(snapshot), left, "{file}");
    }
}

#[test]
fn an_interrupted_transfer_resumes_where_it_stopped() {
    let weights = noise(5_000_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let (_folder, cache) = temporary();
    // The connection breaks more often than the number of attempts, but each attempt makes progress.
    let cut = Fault::Cut(1_100_000);
    hub.fault(&[cut, cut, cut, cut, Fault::Status(503), Fault::Cut(usize::MAX)]);
    hub.pull_file(&cache, &weights);
    let ranges: Vec<Option<String>> = hub.cdn_requests().into_iter().map(|r| r.range).collect();
    assert_eq!(ranges[0], None);
    let offsets: Vec<usize> = ranges[1..]
        .iter()
        .map(|r| r.as_ref().expect("a range")["bytes=".len()..].trim_end_matches('-').parse().unwrap())
        .collect();
    assert!(offsets.len() == 5 && offsets.is_sorted() && offsets[1] > 1_100_000, "{offsets:?}");
}

#[test]
fn a_later_pull_resumes_the_partial_file_of_an_earlier_one() {
    let weights = noise(200_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let (_folder, cache) = temporary();
    hub.fault(&[Fault::Cut(50_000)]);
    let error = hub.pull(&cache, "org/tiny").unwrap_err();
    says(&error, &["tiny.gguf", "was interrupted", "pull again"]);
    says(&cache.find(&name("org/tiny")).unwrap_err(), &["partly downloaded"]);
    let incomplete = repository(&cache).join("blobs").join(sha256(&weights) + ".incomplete");
    let left = fs::metadata(&incomplete).expect("kept").len();
    assert!(left > 0 && left < 200_000, "{left}");

    hub.cdn_requests();
    hub.fault(&[]);
    let mut first = None;
    let report = &mut |p: unicorn::hub::Progress| {
        if let unicorn::hub::Progress::Start { total, here } = p {
            first = Some((total, here));
        }
        true
    };
    let path = pull(&hub.settings(&[]), &cache, &name("org/tiny"), report).expect("pulled");
    assert_eq!(first, Some((200_000, left)));
    assert_eq!(hub.cdn_requests()[0].range, Some(format!("bytes={left}-")));
    assert_eq!(fs::read(path).unwrap(), weights);
    assert!(!incomplete.exists());
}

#[test]
fn a_server_without_range_support_sends_the_file_from_the_start() {
    let weights = noise(200_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let (_folder, cache) = temporary();
    hub.fault(&[Fault::Cut(150_000), Fault::IgnoreRange]);
    hub.pull_file(&cache, &weights);

    // A download that stops at the same position each time makes no progress, and is not retried.
    let (_folder, cache) = temporary();
    hub.cdn_requests();
    hub.fault(&[Fault::Length(2000)]);
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["2000", "200000"]);
    assert_eq!(hub.cdn_requests().len(), 1, "a wrong length is not retried");
}

#[test]
fn leftover_files_with_other_contents_are_not_used() {
    let weights = noise(100_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    for (left, survives) in [(vec![7; 60_000], false), (vec![7; 100_000], false), (vec![7; 100_001], true)] {
        let (_folder, cache) = temporary();
        let blobs_folder = repository(&cache).join("blobs");
        fs::create_dir_all(&blobs_folder).expect("made");
        let incomplete = blobs_folder.join(sha256(&weights) + ".incomplete");
        fs::write(&incomplete, &left).expect("written");
        if !survives {
            let error = hub.pull(&cache, "org/tiny").unwrap_err();
            says(&error, &["tiny.gguf", "SHA-256", &sha256(&weights), "deleted"]);
            assert!(blobs(&cache).is_empty(), "{:?}", blobs(&cache));
        }
        hub.pull_file(&cache, &weights);
    }
    // A blob that was truncated after its check is pulled again.
    let (_folder, cache) = temporary();
    hub.pull(&cache, "org/tiny").expect("pulled");
    let blob = repository(&cache).join("blobs").join(sha256(&weights));
    fs::write(&blob, &weights[..10]).expect("written");
    hub.pull(&cache, "org/tiny").expect("pulled");
    assert_eq!(fs::read(&blob).unwrap(), weights);
}

#[test]
fn a_file_with_a_wrong_checksum_is_deleted() {
    let weights = noise(100_000);
    for lfs in [true, false] {
        let hub = Hub::start(&[("tiny.gguf", &weights, lfs)]);
        let (_folder, cache) = temporary();
        hub.fault(&[Fault::Flip]);
        let error = hub.pull(&cache, "org/tiny").unwrap_err();
        let checksum = if lfs { sha256(&weights) } else { git_sha1(&weights) };
        says(&error, &["tiny.gguf", &checksum, "deleted"]);
        assert!(blobs(&cache).is_empty(), "{:?}", blobs(&cache));
        hub.fault(&[]);
        hub.pull_file(&cache, &weights);
    }
}

#[test]
fn a_request_to_a_stalled_server_times_out_and_is_retried() {
    let weights = noise(100_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let (_folder, cache) = temporary();
    hub.fault(&[Fault::Stall(40_000), Fault::Cut(usize::MAX)]);
    let mut settings = hub.settings(&[]);
    settings.patience.stall = Duration::from_secs(2);
    let path = pull_with(&settings, &cache, "org/tiny").expect("pulled");
    assert_eq!(fs::read(path).unwrap(), weights);
    let asked = hub.cdn_requests();
    assert_eq!(asked[1].range.as_deref(), Some("bytes=40000-"), "{asked:?}");
}

#[test]
fn the_token_is_sent_to_the_hub_only() {
    let hub = Hub::start(&[("tiny.gguf", &noise(1000), true)]);
    let (_folder, cache) = temporary();
    hub.set(|b| {
        b.bare = true;
        b.token = Some("hf_secret".into());
    });
    let settings = hub.settings(&[("HF_TOKEN", "hf_secret\n")]);
    pull_with(&settings, &cache, "org/tiny").expect("pulled");
    let (asked, elsewhere) = (hub.hub_requests(), hub.cdn_requests());
    assert_eq!(asked.iter().map(|r| r.method.as_str()).collect::<Vec<_>>(), ["GET", "HEAD", "GET"]);
    assert!(asked.iter().all(|r| r.authorization.as_deref() == Some("Bearer hf_secret")), "{asked:?}");
    assert_eq!(elsewhere.len(), 1, "the hub's own redirect describes the file");
    assert!(elsewhere.iter().all(|r| r.authorization.is_none()), "{elsewhere:?}");

    let settings = hub.settings(&[("HUGGING_FACE_HUB_TOKEN", "hf_expired")]);
    let error = pull_with(&settings, &cache, "org/tiny").unwrap_err();
    says(&error, &["HUGGING_FACE_HUB_TOKEN", "wrong or expired", "settings/tokens"]);
    assert!(!error.to_string().contains("hf_expired"));
}

#[test]
fn a_file_without_a_checksum_from_the_hub_is_refused() {
    let hub = Hub::start(&[("tiny.gguf", &noise(1000), true), ("small.gguf", b"small", false)]);
    let (_folder, cache) = temporary();
    hub.set(|b| b.bare = true);
    let path = hub.pull(&cache, "org/tiny:small.gguf").expect("pulled");
    assert!(fs::read_link(path).unwrap().ends_with(git_sha1(b"small")));
    hub.set(|b| b.unlinked = true);
    says(&hub.pull(&cache, "org/tiny:tiny.gguf").unwrap_err(), &["tiny.gguf", "checksum"]);
}

#[test]
fn redirects_are_followed_up_to_a_limit() {
    let hub = Hub::start(&[("tiny.gguf", b"tiny", true)]);
    let (_folder, cache) = temporary();
    // The repository was renamed. Redirects of the hub to itself keep the token.
    let settings = hub.settings(&[("HF_TOKEN", "hf_mine")]);
    pull_with(&settings, &cache, "org/old").expect("pulled");
    let asked = hub.hub_requests();
    assert_eq!(asked.len(), 4, "{asked:?}");
    assert!(asked.iter().all(|r| r.authorization.is_some()), "{asked:?}");
    assert!(find(&cache, "org/old").is_some());
    hub.set(|b| b.circular = true);
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["redirects more than"]);
    assert_eq!(hub.hub_requests().len(), 7);
}

#[test]
fn a_hub_with_tls_is_trusted_only_by_its_certificate() {
    let hub = Hub::start(&[("small.gguf", b"small", false), ("tiny.gguf", b"tiny", true)]);
    let (folder, cache) = temporary();
    let (url, certificate) = hub.with_tls();
    let file = folder.path().join("authority.pem");
    fs::write(&file, certificate).expect("written");
    let file = file.to_str().expect("UTF-8");
    let with =
        |variables: &[(&str, &str)]| hub.settings(&[&[("HF_ENDPOINT", url.as_str())], variables].concat());
    let pull = |settings: &Settings, text: &str| pull_with(settings, &cache, text);

    says(&pull(&with(&[]), "org/tiny:small.gguf").unwrap_err(), &["cannot reach", &url, "SSL_CERT_FILE"]);
    let believed = with(&[("SSL_CERT_FILE", file)]);
    let path = pull(&believed, "org/tiny:small.gguf").expect("pulled");
    assert_eq!(fs::read(path).unwrap(), b"small");
    // The CDN of this test has no TLS.
    hub.cdn_requests();
    says(&pull(&believed, "org/tiny:tiny.gguf").unwrap_err(), &["redirects", "not encrypted"]);
    assert!(hub.cdn_requests().is_empty());

    let config = |name: &str| (name == "SSL_CERT_FILE").then(|| "/etc/hostname".into());
    says(&Settings::from_environment(config).unwrap_err(), &["SSL_CERT_FILE"]);
}

#[test]
fn pull_errors_say_what_to_do() {
    let hub = Hub::start(&[("tiny.gguf", b"tiny", true)]);
    let (_folder, cache) = temporary();
    let fails = |text: &str, parts: &[&str]| says(&hub.pull(&cache, text).unwrap_err(), parts);
    let fails_with = |settings: &Settings, parts: &[&str]| {
        says(&pull_with(settings, &cache, "org/tiny").unwrap_err(), parts);
    };
    fails("org/none", &["org/none", "no such model", "HF_TOKEN"]);
    fails("org/tiny@v9", &["org/tiny", "revision", "v9"]);
    fails("org/tiny:x.bin", &["org/tiny", "x.bin", "org/tiny:tiny.gguf"]);
    hub.set(|b| b.gated = true);
    let licence = format!("{}/org/tiny", hub.url);
    fails("org/tiny", &["gated", &licence, "accept", "HF_TOKEN"]);
    fails_with(&hub.settings(&[("HF_TOKEN", "hf_mine")]), &["gated", &licence, "the token from HF_TOKEN"]);

    // A refused pull leaves nothing that looks like a model.
    assert_eq!(listed(&cache), []);
    assert_eq!(find(&cache, "org/tiny"), None);

    hub.set(|b| b.gated = false);
    hub.fault(&[Fault::Status(503)]);
    hub.cdn_requests();
    fails("org/tiny", &["tiny.gguf", "503"]);
    assert_eq!(hub.cdn_requests().len(), 3, "the number of attempts");
    hub.fault(&[Fault::Status(404)]);
    hub.cdn_requests();
    fails("org/tiny", &["404"]);
    assert_eq!(hub.cdn_requests().len(), 1);

    hub.hub_requests();
    fails_with(&hub.settings(&[("HF_HUB_OFFLINE", "1")]), &["HF_HUB_OFFLINE"]);
    assert!(hub.hub_requests().is_empty());
    // No server listens on a port that was just released.
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound");
    let endpoint = format!("http://{free}");
    let settings = Settings::from_environment(|n| (n == "HF_ENDPOINT").then(|| endpoint.clone().into()));
    fails_with(&settings.expect("valid"), &["cannot reach", &endpoint, "HF_ENDPOINT"]);
}

#[test]
fn a_hostile_listing_writes_nothing() {
    let hub = Hub::start(&[("tiny.gguf", b"tiny", true)]);
    let (folder, cache) = temporary();
    let lists = |path: &str, sha: &str, sum: &str, size: u64| {
        let file = json!({"rfilename": path, "size": size, "lfs": {"sha256": sum, "size": size}});
        hub.set(|b| b.listing = Some(json!({"sha": sha, "siblings": [file]}).to_string()));
        hub.pull(&cache, "org/tiny").unwrap_err()
    };
    let sum = sha256(b"tiny");
    for path in
        "../evil.gguf /tmp/evil.gguf a/../../evil.gguf a//b.gguf ..\\evil.gguf a\u{1b}[2J.gguf".split(' ')
    {
        says(&lists(path, COMMIT, &sum, 4), &["org/tiny", "nothing was written"]);
    }
    for sha in ["../../evil", "main", "", "0123456789ABCDEF0123456789abcdef01234567"] {
        says(&lists("tiny.gguf", sha, &sum, 4), &["commit"]);
    }
    // Checksums are used as file names, so a malformed checksum is ignored. The hub is asked for it instead, and does
    // not know the file.
    says(&lists("evil.gguf", COMMIT, "../../../evil", 4), &["evil.gguf"]);
    says(&lists("tiny.gguf", COMMIT, &sum, u64::MAX), &["free", "--models-dir"]);
    let twice = ["config.json", "a.safetensors", "b.safetensors"]
        .map(|path| json!({"rfilename": path, "size": u64::MAX, "lfs": {"sha256": sum, "size": u64::MAX}}));
    let huge = json!({"sha": COMMIT, "siblings": twice});
    for (listing, part) in [
        (huge.to_string(), "free"),
        ("[]".into(), "listing"),
        ("<html>".into(), "listing"),
        (format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", " ".repeat(17 << 20)), "more than"),
        ("[".repeat(100_000), "listing"),
    ] {
        hub.set(|b| b.listing = Some(listing));
        says(&hub.pull(&cache, "org/tiny").unwrap_err(), &[part]);
    }
    let written = names_in(folder.path());
    assert!(written.is_empty() || written == ["hub"], "{written:?}");
    assert!(blobs(&cache).is_empty() && !repository(&cache).join("refs/main").exists());
}

#[test]
fn an_unwritable_folder_is_named_in_the_error() {
    let hub = Hub::start(&[("tiny.gguf", b"tiny", true)]);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "x").expect("written");
    let cache = Cache::system(file.join("models"));
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["create the folder", file.to_str().unwrap()]);
    // Even the superuser cannot write in /proc, though it can anywhere else.
    let cache = Cache::system("/proc/models");
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["/proc/models"]);
    // A folder is in the place of the file.
    let cache = Cache::of_user(folder.path().join("hub"));
    fs::create_dir_all(repository(&cache).join("blobs").join(sha256(b"tiny") + ".incomplete")).expect("made");
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["write", ".incomplete"]);
}

#[test]
fn only_one_process_writes_a_file_at_a_time() {
    let weights = noise(400_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let (_folder, cache) = temporary();
    let locks = cache.root().join(".locks/models--org--tiny");
    fs::create_dir_all(&locks).expect("made");
    let lock = fs::File::create(locks.join(sha256(&weights) + ".lock")).expect("made");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    says(&hub.pull(&cache, "org/tiny").unwrap_err(), &["tiny.gguf", "another process", ".lock"]);
    assert!(hub.cdn_requests().is_empty());
    let removal = cache.removal(&name("org/tiny")).expect("valid").expect("something");
    says(&removal.apply().unwrap_err(), &["another process"]);
    // A child that another test starts just now has the file open, too, and with it the lock.
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::Unlock).expect("unlocked");

    let results: Vec<_> = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4).map(|_| scope.spawn(|| hub.pull(&cache, "org/tiny"))).collect();
        pulls.into_iter().map(|p| p.join().expect("no panic")).collect()
    });
    assert!(results.iter().any(Result::is_ok), "{results:?}");
    assert!(results.iter().all(|r| matches!(r, Ok(_) | Err(HubError::Busy { .. }))), "{results:?}");
    let path = find(&cache, "org/tiny").expect("pulled");
    assert_eq!(fs::read(path).unwrap(), weights);
}

// --- listing and removing ---------------------------------------------------------------------------------------

/// Name, format and bytes of every model.
fn listed(cache: &Cache) -> Vec<(String, Format, u64)> {
    let all = cache.list().expect("valid");
    assert!(all.iter().all(|m| m.path.exists()), "{all:?}");
    all.into_iter().map(|m| (m.name.to_string(), m.format, m.bytes)).collect()
}

#[test]
fn a_removed_model_is_deleted_with_all_blobs_that_no_other_needs() {
    let hub = Hub::start(&[("a-Q4_0.gguf", b"four", true), ("a-Q8_0.gguf", b"eightbit", true)]);
    let (folder, cache) = temporary();
    assert_eq!(listed(&cache), []);
    hub.pull(&cache, "org/tiny:Q4_0").expect("pulled");
    hub.pull(&cache, "org/tiny:Q8_0").expect("pulled");
    hub.set(|b| b.commit = OTHER_COMMIT.into());
    hub.pull(&cache, "org/tiny@v1:Q8_0").expect("pulled");
    let gguf = |name: &str, bytes| (name.to_owned(), Format::Gguf, bytes);
    let (four, eight) = (gguf("org/tiny:a-Q4_0.gguf", 4), gguf("org/tiny:a-Q8_0.gguf", 8));
    let tagged = gguf("org/tiny@v1:a-Q8_0.gguf", 8);
    assert_eq!(listed(&cache), [four.clone(), eight, tagged.clone()]);
    // Files of other tools in the same folder are not models.
    fs::create_dir_all(cache.root().join("datasets--org--x/blobs")).expect("made");
    fs::write(cache.root().join("version.txt"), "1").expect("written");
    assert_eq!(listed(&cache).len(), 3);

    let remove = |text: &str| {
        let removal = cache.removal(&name(text)).expect("valid").expect("something");
        let bytes = removal.bytes;
        removal.apply().expect("removed");
        bytes
    };
    assert_eq!(remove("org/tiny:Q8_0"), 0, "the other revision needs the blob");
    assert_eq!(listed(&cache), [four.clone(), tagged]);
    assert_eq!(remove("org/tiny@v1"), 8);
    assert_eq!(listed(&cache), [four]);
    assert_eq!(blobs(&cache), [sha256(b"four")]);
    for absent in ["org/tiny@v1", "org/tiny:Q8_0", "org/other"] {
        assert!(cache.removal(&name(absent)).expect("valid").is_none(), "{absent}");
    }

    // A link out of the folder is removed, but not its target.
    let outside = folder.path().join("precious.gguf");
    fs::write(&outside, "precious").expect("written");
    let snapshot = repository(&cache).join("snapshots").join(COMMIT);
    symlink(&outside, snapshot.join("x-Q2_K.gguf")).expect("linked");
    assert_eq!(remove("org/tiny:x-Q2_K.gguf"), 0);
    assert!(outside.exists() && !snapshot.join("x-Q2_K.gguf").exists());
    assert_eq!(remove("org/tiny"), 4);
    assert_eq!(listed(&cache), []);
    assert!(!repository(&cache).exists() && cache.root().join("datasets--org--x").exists());
}

#[test]
fn an_incomplete_model_is_reported_as_incomplete() {
    let hub = Hub::start(&[
        ("config.json", b"{}", false),
        ("model.safetensors.index.json", b"{ }", false),
        ("model-00001-of-00002.safetensors", b"one", true),
        ("model-00002-of-00002.safetensors", b"two", true),
    ]);
    let (_folder, cache) = temporary();
    let whole = Fault::Cut(usize::MAX);
    hub.fault(&[whole, whole, whole, Fault::Cut(0)]);
    let error = hub.pull(&cache, "org/tiny").unwrap_err();
    says(&error, &["model-00002-of-00002.safetensors", "was interrupted"]);
    says(&cache.find(&name("org/tiny")).unwrap_err(), &["partly downloaded", "unicorn pull org/tiny"]);
    // Both JSON files and one of two weight files.
    assert_eq!(listed(&cache), [("org/tiny".to_owned(), Format::Partial, 8)]);
    hub.fault(&[]);
    let path = hub.pull(&cache, "org/tiny").expect("pulled");
    assert_eq!(find(&cache, "org/tiny"), Some(path));
    assert_eq!(listed(&cache), [("org/tiny".to_owned(), Format::Safetensors, 11)]);
}

// --- the commands -----------------------------------------------------------------------------------------------

/// The binary, with its own home folder.
fn unicorn(home: &Path, hub: &Hub, args: &[&str]) -> Command {
    let mut command = unicorn_on_software(args);
    at_home(&mut command, home, hub);
    command
}

#[test]
fn a_pulled_model_is_found_by_its_name() {
    let hub = tiny_gemma();
    let home = tempfile::tempdir().expect("a folder");
    let options = ["--prompt", "Hello", "--max-tokens", "4", "--temperature", "0", "--allow-software-vulkan"];
    let with_model = |model| [&["generate", "--model", model], &options[..]].concat();
    let generate = with_model("org/tiny");
    let (code, _, stderr) = output(unicorn(home.path(), &hub, &generate));
    assert!(code == 1 && stderr.contains("`unicorn pull org/tiny`"), "{stderr}");
    assert!(hub.hub_requests().is_empty(), "only `pull` sends requests to the hub");

    let (code, stdout, stderr) = output(unicorn(home.path(), &hub, &["pull", "org/tiny"]));
    assert_eq!((code, stderr.as_str()), (0, ""), "no progress is shown without a terminal");
    let path = home.path().join(".cache/huggingface/hub/models--org--tiny/snapshots").join(COMMIT);
    assert_eq!(stdout, format!("{}\n", path.display()));
    hub.hub_requests();
    let answer = printed(unicorn(home.path(), &hub, &generate));
    let by_path = with_model(path.to_str().expect("UTF-8"));
    assert_eq!(printed(unicorn(home.path(), &hub, &by_path)), answer);
    assert!(answer.trim().len() > 1 && hub.hub_requests().is_empty(), "{answer:?}");
    let report = printed(unicorn(home.path(), &hub, &["inspect", "org/tiny", "--json"]));
    assert!(report.contains(COMMIT), "{report}");
}

#[test]
fn a_pulled_gguf_file_is_loaded_by_its_tag() {
    let file = fs::read(data("gguf/gguf-s/gguf-s-Q4_K_M.gguf")).expect("the file");
    let hub = Hub::start(&[("gguf-s-Q4_K_M.gguf", &file, true), ("gguf-s-Q8_0.gguf", b"another", true)]);
    let home = tempfile::tempdir().expect("a folder");
    let path = printed(unicorn(home.path(), &hub, &["pull", "org/tiny:q4_k_m"]));
    let inspect = |name: &str| printed(unicorn(home.path(), &hub, &["inspect", name, "--json"]));
    for name in ["org/tiny", "org/tiny:Q4_K_M"] {
        let by_name = inspect(name);
        assert!(by_name == inspect(path.trim_end()) && by_name.contains("gguf"), "{by_name}");
    }
}

#[test]
fn a_killed_pull_is_resumed() {
    let weights = noise(100_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let home = tempfile::tempdir().expect("a folder");
    hub.fault(&[Fault::Stall(40_000), Fault::Cut(usize::MAX)]);
    let mut killed = unicorn(home.path(), &hub, &["pull", "org/tiny"]).spawn().expect("runs");
    let blobs = home.path().join(".cache/huggingface/hub/models--org--tiny/blobs");
    let incomplete = blobs.join(sha256(&weights) + ".incomplete");
    wait_until("bytes arrive", || fs::metadata(&incomplete).is_ok_and(|m| m.len() >= 40_000));
    killed.kill().expect("killed");
    killed.wait().expect("gone");
    hub.cdn_requests();
    let stdout = printed(unicorn(home.path(), &hub, &["pull", "org/tiny"]));
    assert_eq!(hub.cdn_requests()[0].range.as_deref(), Some("bytes=40000-"));
    assert_eq!(fs::read(stdout.trim_end()).unwrap(), weights);
}

#[test]
fn a_failed_write_keeps_the_bytes_that_arrived() {
    let weights = noise(100_000);
    let hub = Hub::start(&[("tiny.gguf", &weights, true)]);
    let home = tempfile::tempdir().expect("a folder");
    // The write fails as on a full disk. The shell limits the file size in blocks of 512 or 1024 bytes.
    let pull = unicorn(home.path(), &hub, &["pull", "org/tiny"]);
    let (code, _, stderr) = output(in_shell("trap '' XFSZ; ulimit -f 40;", &pull));
    assert!(
        code == 1 && stderr.starts_with("error: cannot write") && stderr.contains(".incomplete"),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    hub.cdn_requests();
    let stdout = printed(unicorn(home.path(), &hub, &["pull", "org/tiny"]));
    let range = hub.cdn_requests()[0].range.clone().expect("a range");
    assert!(["bytes=20480-", "bytes=40960-"].contains(&range.as_str()), "{range}");
    assert_eq!(fs::read(stdout.trim_end()).unwrap(), weights);
}

#[test]
fn the_commands_pull_list_and_remove_models() {
    let hub = Hub::start(&[("a-Q4_0.gguf", b"four", true), ("sub/a-Q8_0.gguf", b"eightbit", true)]);
    let home = tempfile::tempdir().expect("a folder");
    let system = home.path().join("srv/models");
    let dir = system.to_str().expect("UTF-8");
    let (code, stdout, stderr) = output(unicorn(home.path(), &hub, &["pull", "org/tiny"]));
    assert_eq!((code, stdout.as_str()), (1, ""));
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(lines.len() == 3 && lines[0].trim() == "4 B  org/tiny:a-Q4_0.gguf", "{stderr}");
    assert!(lines[2].starts_with("error: org/tiny "), "{stderr}");

    // The service user must be able to read the pulled files, even if the pulling user has a strict umask.
    let pull = unicorn(home.path(), &hub, &["pull", "org/tiny:Q8_0", "--models-dir", dir]);
    let pull = in_shell("umask 077;", &pull);
    let stdout = printed(pull);
    let file = system.join("models--org--tiny/snapshots").join(COMMIT).join("sub/a-Q8_0.gguf");
    assert_eq!(stdout, format!("{}\n", file.display()));
    assert_eq!(fs::read_link(&file).expect("a link"), Path::new("../../../blobs").join(sha256(b"eightbit")));
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(&file), 0o644);
    assert_eq!(mode(&system.join("models--org--tiny/refs/main")), 0o644);
    for folder in file.ancestors().skip(1).take_while(|f| *f != home.path()) {
        assert_eq!(mode(folder), 0o755, "{}", folder.display());
    }

    output(unicorn(home.path(), &hub, &["pull", "org/tiny:Q4_0"]));
    let mut list = unicorn(home.path(), &hub, &["models", "list", "--json"]);
    list.env("UNICORN_MODELS_DIR", dir);
    let rows = printed_json(list);
    let names: Vec<&str> = rows.as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["org/tiny:sub/a-Q8_0.gguf", "org/tiny:a-Q4_0.gguf"], "models.dir is searched first");
    assert_eq!((&rows[0]["bytes"], &rows[0]["format"]), (&json!(8), &json!("gguf")));
    let stdout = printed(unicorn(home.path(), &hub, &["models", "list"]));
    assert!(stdout.lines().count() == 1 && stdout.starts_with("org/tiny:a-Q4_0.gguf  gguf"), "{stdout}");

    // An unfinished pull in models.dir does not hide a complete model in the other cache.
    let begun = home.path().join("begun");
    fs::create_dir_all(begun.join("models--org--tiny/blobs")).expect("made");
    fs::write(begun.join("models--org--tiny/blobs/0123.incomplete"), "fo").expect("written");
    let inspect = |home: &Path| {
        let mut inspect = unicorn(home, &hub, &["inspect", "org/tiny"]);
        inspect.env("UNICORN_MODELS_DIR", &begun);
        output(inspect).2
    };
    let found = inspect(home.path());
    assert!(found.contains("a-Q4_0.gguf: "), "{found}");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let found = inspect(elsewhere.path());
    assert!(found.contains("org/tiny is only partly downloaded; `unicorn pull org/tiny`"), "{found}");

    for (yes, expected, part) in [
        (&[][..], 1, "--yes"),
        (&["--yes"], 0, "removed org/tiny, 4 B"),
        (&["--yes"], 1, "no such model was pulled"),
    ] {
        let remove = [&["models", "rm", "org/tiny"], yes].concat();
        let (code, _, stderr) = output(unicorn(home.path(), &hub, &remove));
        assert!(code == expected && stderr.contains(part), "{stderr}");
    }
    assert!(file.exists(), "the other folder was not named");
    let stdout = printed(unicorn(home.path(), &hub, &["models", "list"]));
    assert!(stdout.contains("unicorn pull"), "{stdout}");
    let (code, _, stderr) = output(unicorn(home.path(), &hub, &["pull", "tiny"]));
    assert!(code == 2 && stderr.contains("ORG/NAME"), "{stderr}");
}

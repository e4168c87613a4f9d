//! `sublet save`: what a tenant has saved, in files, when its processes are real ones.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sublet_tests::{Job, JobOptions, MIB, Outcome, Ran, Stage, Trouble};
use tenants::coordinator::{Coordinator, Interrupt, Options, Trouble as Told};
use tenants::identity::TenantName;

const CAPACITIES: [u64; 2] = [256 * MIB; 2];

/// As `sublet.h` and `programs/rank/job.h` have them.
const KEEP: u32 = 0;
const DISCARD: u32 = 1;
const FILE: u32 = 2;
const FOR_WEIGHTS: u32 = 4;
const FOR_STATIC: u32 = 32;
const FOR_HELD: u32 = 512;

/// Bytes of the memory that `rank` has for `purpose`, as `programs/rank/job.h` computes its words.
fn pattern(rank: u32, purpose: u32, size_bytes: u64) -> Vec<u8> {
    let word = |index: u64| {
        let index = u32::try_from(index).unwrap_or_default();
        let word = index
            .wrapping_mul(2_654_435_761)
            .wrapping_add((rank + 1).wrapping_mul(40_503))
            .wrapping_add(purpose.wrapping_mul(2_246_822_519));
        word ^ (word >> 15)
    };
    (0..size_bytes / 4).flat_map(|index| word(index).to_le_bytes()).collect()
}

/// Has a rank hold memory of a region, as `programs/rank.c` says; returns its address as a map has it.
fn hold(job: &mut Job, rank: usize, tag: &str, contents: u32, mib: u64) -> Outcome<String> {
    let line = format!("hold {tag} {contents} {mib}");
    let [address] = job.ranks[rank].do_it(&line)?.numbers::<1>()?;
    Ok(format!("{address:#x}"))
}

fn text(path: &Path) -> Outcome<&str> {
    path.to_str().ok_or_else(|| Trouble::new("a path that is no text"))
}

fn save(stage: &Stage, dir: &Path) -> Outcome<Ran> {
    stage.sublet(&["save", "train", text(dir)?])
}

fn read_json(path: &Path) -> Outcome<Value> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// The map of one process, and its file's bytes.
fn files_of(dir: &Path, pid: u32) -> Outcome<(Value, Vec<u8>)> {
    let tenant = read_json(&dir.join("tenant.json"))?;
    let processes = tenant["processes"].as_array().into_iter().flatten();
    let process = processes.into_iter().find(|process| process["pid"] == pid);
    let name = process.and_then(|process| process["map"].as_str());
    let name = name.ok_or_else(|| Trouble::new(format!("no process {pid} in {tenant:#}")))?;
    let map = read_json(&dir.join(name))?;
    let data =
        map["data"].as_str().map_or_else(|| Ok(Vec::new()), |data| fs::read(dir.join(data)))?;
    Ok((map, data))
}

fn list<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    value[name].as_array().into_iter().flatten()
}

/// The allocation that is mapped at `address`.
fn at<'a>(map: &'a Value, address: &str) -> Outcome<&'a Value> {
    let is_there =
        |found: &&Value| list(found, "addresses").any(|mapped| mapped["address"] == address);
    list(map, "allocations")
        .find(is_there)
        .ok_or_else(|| Trouble::new(format!("nothing at {address} in {map:#}")))
}

/// The saved bytes of an allocation, end to end.
fn bytes_of(allocation: &Value, data: &[u8]) -> Vec<u8> {
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap_or(0)).unwrap_or(0);
    let begin = number(&allocation["file_offset"]);
    let part = |part: &Value| {
        let start = begin + number(&part["offset"]);
        data[start..start + number(&part["bytes"])].to_vec()
    };
    list(allocation, "saved").flat_map(part).collect()
}

/// Is there an allocation with just these bytes?
fn has_bytes(map: &Value, data: &[u8], wanted: &[u8]) -> bool {
    list(map, "allocations").any(|allocation| bytes_of(allocation, data) == wanted)
}

fn entries(dir: &Path) -> Outcome<Vec<String>> {
    let names =
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Outcome<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Where files of this test go: next to the node, and gone with it.
fn place(stage: &Stage, name: &str) -> PathBuf {
    stage.node_path().with_file_name(name)
}

#[test]
fn files_hold_what_every_process_had_and_the_tenant_goes_on() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 2).with("SUBLET_FILE_DIR", "/dev/shm");
    let mut job = stage.connected_job(&options)?;
    let weights = hold(&mut job, 0, "weights", KEEP, 10)?;
    let frozen = hold(&mut job, 0, "frozen", FILE, 6)?;
    let cache = hold(&mut job, 0, "kv", DISCARD, 4)?;
    let other = hold(&mut job, 1, "weights", KEEP, 2)?;
    stage.pause("train")?;
    let used: Vec<u64> = (0..2).map(|device| stage.used_bytes(device)).collect::<Outcome<_>>()?;

    let dir = place(&stage, "saved");
    let ran = save(&stage, &dir)?.succeeded()?;
    assert!(ran.stdout.contains("wrote ") && ran.stdout.contains("of tenant 'train'"), "{ran:#?}");
    assert!(ran.stdout.contains("not kept: contents that were to be discarded"), "{ran:#?}");
    assert_eq!(fs::metadata(&dir)?.permissions().mode() & 0o777, 0o700);
    assert_eq!(entries(&dir)?.len(), 5, "two files for each, and the map of all");
    let tenant = read_json(&dir.join("tenant.json"))?;
    assert_eq!(
        (&tenant["format"], &tenant["version"], &tenant["complete"]),
        (&json!("sublet-save"), &json!(1), &json!(true))
    );

    let (map, data) = files_of(&dir, job.ranks[0].pid())?;
    assert_eq!(map["process"]["state"], "paused");
    let found = at(&map, &weights)?;
    assert_eq!((&found["tag"], &found["contents"]), (&json!("weights"), &json!("keep")));
    assert!(bytes_of(found, &data) == pattern(0, FOR_HELD, 10 * MIB), "weights");
    assert!(bytes_of(at(&map, &frozen)?, &data) == pattern(0, FOR_HELD + 1, 6 * MIB), "frozen");
    let discarded = at(&map, &cache)?;
    assert_eq!(
        (&discarded["why_not"], &discarded["file_offset"]),
        (&json!("discarded"), &Value::Null)
    );
    for purpose in [FOR_WEIGHTS, FOR_STATIC, FOR_STATIC + 1] {
        assert!(has_bytes(&map, &data, &pattern(0, purpose, 2 * MIB)), "{purpose}");
    }
    // Who imports what from whom, as both say it.
    let (peer_map, peer_data) = files_of(&dir, job.ranks[1].pid())?;
    assert!(bytes_of(at(&peer_map, &other)?, &peer_data) == pattern(1, FOR_HELD, 2 * MIB));
    let imported =
        list(&map, "imports").find(|import| import["owner"] == peer_map["process"]["member"]);
    let imported = imported.ok_or_else(|| Trouble::new(format!("no import in {map:#}")))?;
    let owned = list(&peer_map, "allocations").find(|own| own["id"] == imported["id"]);
    let owned = owned.ok_or_else(|| Trouble::new(format!("no {imported} in {peer_map:#}")))?;
    assert_eq!(owned["importers"], json!([map["process"]["member"]]));

    assert_eq!(stage.states("train")?, ["paused"]);
    assert_eq!(used, (0..2).map(|device| stage.used_bytes(device)).collect::<Outcome<Vec<_>>>()?);
    stage.resume("train")?;
    job.works()?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn checksums_and_holes_are_as_python_reads_them_by_the_documentation() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let mut job = stage.job(&JobOptions::new("train", 1))?;
    hold(&mut job, 0, "weights", KEEP, 4)?;
    stage.pause("train")?;
    let dir = place(&stage, "saved");
    save(&stage, &dir)?.succeeded()?;
    let document =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/save.md"))?;
    let program = document.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
    let mut program = program.ok_or_else(|| Trouble::new("no program in docs/save.md"))?.to_owned();
    program.push_str(
        "\nimport sys\n\
         found = [a for p, a in allocations(sys.argv[1]) if a['tag'] == 'weights']\n\
         sys.stdout.buffer.write(contents(sys.argv[1], found[0]['id']))\n",
    );
    let output = Command::new("python3").args(["-c", &program]).arg(&dir).output()?;
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout == pattern(0, FOR_HELD, 4 * MIB));
    // One byte more or less is noticed.
    let (map, mut data) = files_of(&dir, job.ranks[0].pid())?;
    let found = list(&map, "allocations").find(|found| found["tag"] == "weights");
    let offset = found.and_then(|found| found["file_offset"].as_u64()).unwrap_or(0);
    data[usize::try_from(offset)? + 100] ^= 1;
    let name = map["data"].as_str().unwrap_or_default();
    fs::write(dir.join(name), data)?;
    let output = Command::new("python3").args(["-c", &program]).arg(&dir).output()?;
    assert!(!output.status.success() && output.stdout.is_empty(), "a damaged file was read");
    // A map may name nothing but a file of the directory.
    let mut maps = read_json(&dir.join("tenant.json"))?;
    let own = maps["processes"][0]["map"].as_str().unwrap_or_default().to_owned();
    let outside = place(&stage, "outside.json");
    fs::copy(dir.join(&own), &outside)?;
    symlink(&outside, dir.join("link.json"))?;
    for name in ["../outside.json", text(&outside)?, "link.json", "..", ""] {
        maps["processes"][0]["map"] = json!(name);
        fs::write(dir.join("tenant.json"), maps.to_string())?;
        let output = Command::new("python3").args(["-c", &program]).arg(&dir).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let is_refused =
            ["leads out", "Too many levels", "Is a directory"].map(|why| said.contains(why));
        assert!(is_refused.contains(&true), "{name}: {said}");
    }
    stage.resume("train")?;
    job.exit()
}

#[test]
fn a_tag_that_is_away_is_written_while_its_process_runs() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    let weights = hold(&mut job, 1, "weights", KEEP, 4)?;
    stage.patiently(&["pause", "train", "--tag", "weights", "--keep-running"])?;
    job.run()?;
    let dir = place(&stage, "saved");
    let ran = save(&stage, &dir)?.succeeded()?;
    let idle = format!("process {} has nothing saved", job.ranks[0].pid());
    assert!(ran.stdout.contains(&idle), "{ran:#?}");
    job.stop()?;
    let (map, data) = files_of(&dir, job.ranks[1].pid())?;
    assert_eq!(map["process"]["state"], "active");
    assert!(bytes_of(at(&map, &weights)?, &data) == pattern(1, FOR_HELD, 4 * MIB));
    assert_eq!(data.len() as u64, 4 * MIB, "nothing else");
    let in_place = list(&map, "allocations").filter(|found| found["why_not"] == "in_place");
    assert!(in_place.count() > 3, "{map:#}");
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn a_tenant_whose_resume_can_never_succeed_says_so_and_is_saved() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    stage.pause("train")?;
    job.ranks[1].kill()?;
    let refused = stage.sublet(&["resume", "train"])?.exited(1)?;
    for words in ["--without-lost", "`sublet save train DIR` writes what is saved to files"] {
        assert!(refused.stderr.contains(words), "{refused:#?}");
    }
    let dir = place(&stage, "saved");
    save(&stage, &dir)?.succeeded()?;
    let (map, data) = files_of(&dir, job.ranks[0].pid())?;
    assert!(has_bytes(&map, &data, &pattern(0, FOR_STATIC, 2 * MIB)));
    assert!(list(&map, "imports").count() > 0, "{map:#}");
    stage.patiently(&["resume", "train", "--without-lost"])?;
    Ok(())
}

#[test]
fn a_directory_with_something_in_it_is_left_as_it_is() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let job = stage.job(&JobOptions::new("train", 1))?;
    let dir = place(&stage, "saved");
    let ran = save(&stage, &dir)?.exited(1)?;
    assert!(ran.stderr.contains("tenant 'train' has nothing saved"), "{ran:#?}");
    assert!(!dir.exists(), "a directory for nothing");
    stage.pause("train")?;
    fs::create_dir(&dir)?;
    fs::write(dir.join("process-1.bin"), "mine")?;
    let ran = save(&stage, &dir)?.exited(2)?;
    assert!(ran.stderr.contains("is not empty"), "{ran:#?}");
    assert_eq!(entries(&dir)?, ["process-1.bin"]);
    let ran = save(&stage, &dir.join("process-1.bin"))?.exited(2)?;
    assert!(ran.stderr.contains("Not a directory"), "{ran:#?}");
    let ran = save(&stage, &dir.join("not/there"))?.exited(2)?;
    assert!(ran.stderr.contains("No such file or directory"), "{ran:#?}");
    fs::remove_file(dir.join("process-1.bin"))?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
    let ran = save(&stage, &dir)?.exited(2)?;
    assert!(ran.stderr.contains("open to others (mode 755): chmod 700"), "{ran:#?}");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
    save(&stage, &dir)?.succeeded()?;
    stage.resume("train")?;
    job.exit()
}

#[test]
fn one_process_that_may_not_write_so_much_does_not_keep_the_other_from_it() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    hold(&mut job, 1, "weights", KEEP, 10)?;
    stage.pause("train")?;
    let pid = job.ranks[1].pid().to_string();
    let limit = |limit: &str| -> Outcome {
        let limits = format!("--fsize={limit}:");
        let done = Command::new("prlimit").args(["--pid", &pid, &limits]).status()?;
        assert!(done.success(), "prlimit is part of util-linux");
        Ok(())
    };
    limit(&(12 * MIB).to_string())?;
    let dir = place(&stage, "saved");
    let ran = save(&stage, &dir)?.exited(3)?;
    let not_written = format!("NOT WRITTEN: process {pid}:");
    assert!(ran.stdout.contains(&not_written) && ran.stdout.contains("ulimit -f"), "{ran:#?}");
    let tenant = read_json(&dir.join("tenant.json"))?;
    assert_eq!(tenant["complete"], false);
    assert_eq!(entries(&dir)?.len(), 3, "nothing of the other");
    let (map, data) = files_of(&dir, job.ranks[0].pid())?;
    assert!(has_bytes(&map, &data, &pattern(0, FOR_STATIC, 2 * MIB)));
    // Without the limit it is all there.
    limit("unlimited")?;
    let whole = place(&stage, "whole");
    save(&stage, &whole)?.succeeded()?;
    let (map, data) = files_of(&whole, job.ranks[1].pid())?;
    assert!(has_bytes(&map, &data, &pattern(1, FOR_HELD, 10 * MIB)));
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn a_process_that_does_not_answer_is_named_and_the_others_are_written() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    stage.pause("train")?;
    job.ranks[1].stop()?;
    let dir = place(&stage, "saved");
    let ran = save(&stage, &dir)?.exited(3)?;
    let not_written = format!("NOT WRITTEN: process {}: it did not answer", job.ranks[1].pid());
    assert!(ran.stdout.contains(&not_written), "{ran:#?}");
    assert!(files_of(&dir, job.ranks[0].pid()).is_ok());
    job.ranks[1].signal(Signal::SIGCONT)?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn a_save_that_is_called_off_half_way_leaves_nothing() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    stage.pause("train")?;
    let (interrupt, raise) = Interrupt::new()?;
    let options = Options { interrupt: Some(interrupt), ..Options::default() };
    let coordinator = Coordinator::new(stage.run_dir().clone(), TenantName::new("train")?, options);
    let dir = place(&stage, "saved");
    let mut told = Ok(0);
    // As Ctrl-C does it, when all have been asked to write and none has answered.
    let saved =
        tenants::keep::save(&coordinator, &dir, &mut |_| told = nix::unistd::write(&raise, &[1]));
    told?;
    assert!(matches!(saved, Err(Told::NotSaved { .. })), "{saved:?}");
    assert!(!dir.exists());
    assert_eq!(stage.states("train")?, ["paused"]);
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn what_is_discarded_takes_no_place() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let mut job = stage.job(&JobOptions::new("train", 1))?;
    hold(&mut job, 0, "kv", DISCARD, 64)?;
    stage.pause("train")?;
    let dir = place(&stage, "saved");
    save(&stage, &dir)?.succeeded()?;
    let (map, data) = files_of(&dir, job.ranks[0].pid())?;
    let name = map["data"].as_str().unwrap_or_default();
    let blocks = fs::metadata(dir.join(name))?.blocks() * 512;
    assert!(blocks <= data.len() as u64 + MIB, "{blocks}");
    assert!(data.len() < 32 << 20, "what is discarded has no place: {}", data.len());
    assert_eq!(map["account"]["not_kept_bytes"], json!(68 * MIB), "and the scratch memory");
    stage.resume("train")?;
    job.exit()
}

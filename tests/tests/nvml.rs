//! What NVIDIA's management library says inside a tenant with a budget: as much memory as the tenant may hold, and the tenant's
//! own processes. Without a budget, and outside, what it says of the GPU.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value;
use sublet_tests::{Files, MIB, Outcome, Rank, Stage};

const CAPACITY: u64 = 256 * MIB;
/// What the simulated driver keeps for itself, in addition to what CUDA shows.
const RESERVED: u64 = 3 * MIB;
const INSUFFICIENT_SIZE: u64 = 7;

fn stage() -> Outcome<Stage> {
    Stage::new(&[CAPACITY; 2])
}

fn create(process: &mut Rank, device: u32, bytes: u64) -> Outcome<u64> {
    let [number] = process.do_it(&format!("create {device} {bytes}"))?.numbers()?;
    Ok(number)
}

fn memory(asker: &mut Rank, index: u32) -> Outcome<[u64; 3]> {
    asker.do_it(&format!("memory {index}"))?.numbers()
}

fn memory_2(asker: &mut Rank, index: u32) -> Outcome<[u64; 4]> {
    asker.do_it(&format!("memory2 {index} 2"))?.numbers()
}

/// Ids and bytes of the processes on a GPU, in order of their ids.
fn processes(asker: &mut Rank, form: u32, index: u32) -> Outcome<Vec<(u64, u64)>> {
    let said = asker.do_it(&format!("processes {form} {index} 64"))?.text;
    let figures: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
    let mut rows: Vec<_> = figures[1..].chunks_exact(2).map(|row| (row[0], row[1])).collect();
    assert_eq!(figures[0], rows.len() as u64, "{said}");
    rows.sort_unstable();
    Ok(rows)
}

fn holds(process: &Rank, bytes: u64) -> (u64, u64) {
    (u64::from(process.pid()), bytes)
}

#[test]
fn a_gpu_is_as_large_as_the_budget_also_to_one_that_never_uses_cuda() -> Outcome {
    let stage = stage()?;
    let options = ["--budget", "0=64MiB"];
    // Before any process of the tenant has memory: what the first will bring along.
    let mut asker = stage.asks_nvml(Some("infer"), &options, &[])?;
    assert_eq!(memory(&mut asker, 0)?, [64 * MIB, 64 * MIB, 0]);
    assert_eq!(memory(&mut asker, 1)?, [CAPACITY + RESERVED, CAPACITY, RESERVED]);
    let mut holder = stage.hoard("infer", &options, &[])?;
    let block = create(&mut holder, 0, 24 * MIB)?;
    assert_eq!(memory(&mut asker, 0)?, [64 * MIB, 40 * MIB, 24 * MIB]);
    assert_eq!(memory_2(&mut asker, 0)?, [64 * MIB, 0, 40 * MIB, 24 * MIB]);
    assert_eq!(memory_2(&mut asker, 1)?, [CAPACITY + RESERVED, RESERVED, CAPACITY, 0]);
    // Others have taken what the budget would leave: the same as the driver says.
    let mut stranger = stage.hoard("train", &[], &[])?;
    create(&mut stranger, 0, 216 * MIB)?;
    let [free, total] = holder.do_it("info 0")?.numbers()?;
    assert_eq!([total, free], [64 * MIB, 16 * MIB]);
    assert_eq!(memory(&mut asker, 0)?, [total, free, total - free]);
    // A pause gives it back, and a change counts immediately.
    stage.pause("infer")?;
    assert_eq!(memory(&mut asker, 0)?[1..], [40 * MIB, 24 * MIB]);
    stage.resume("infer")?;
    stage.sublet(&["budget", "infer", "0=128MiB"])?.succeeded()?;
    assert_eq!(memory(&mut asker, 0)?, [128 * MIB, 16 * MIB, 112 * MIB]);
    stage.sublet(&["budget", "infer", "none"])?.succeeded()?;
    let used = 240 * MIB + RESERVED;
    assert_eq!(memory(&mut asker, 0)?, [CAPACITY + RESERVED, 16 * MIB, used]);
    holder.do_it(&format!("free {block}"))?;
    holder.kill()?;
    Ok(())
}

#[test]
fn one_that_counts_is_told_what_the_driver_says_whatever_becomes_of_the_file() -> Outcome {
    let stage = stage()?;
    let libraries = stage.libraries_with_nvml();
    let settings = [("LD_LIBRARY_PATH", libraries.as_str())];
    let mut one = stage.hoard("infer", &["--budget", "0=64MiB"], &settings)?;
    let mut second = [("CUDA_VISIBLE_DEVICES", "1")].to_vec();
    second.extend(settings);
    let mut on_the_other = stage.hoard("infer", &[], &second)?;
    create(&mut one, 0, 24 * MIB)?;
    create(&mut on_the_other, 0, 10 * MIB)?;
    for asker in [&mut one, &mut on_the_other] {
        assert_eq!(asker.do_it("nvml 0")?.numbers::<3>()?, [64 * MIB, 40 * MIB, 24 * MIB]);
        let whole = [CAPACITY + RESERVED, CAPACITY - 10 * MIB, 10 * MIB + RESERVED];
        assert_eq!(asker.do_it("nvml 1")?.numbers::<3>()?, whole);
    }
    // A cleaner of /tmp takes the file away.
    std::fs::remove_file(stage.run_dir_path().join("infer/budget"))?;
    assert_eq!(one.do_it("nvml 0")?.numbers::<3>()?, [64 * MIB, 40 * MIB, 24 * MIB]);
    assert_eq!(one.do_it("info 0")?.numbers::<2>()?, [40 * MIB, 64 * MIB]);
    Ok(())
}

#[test]
fn the_processes_are_those_of_the_tenant() -> Outcome {
    let stage = stage()?;
    let options = ["--budget", "0=64MiB"];
    let mut one = stage.hoard("infer", &options, &[])?;
    let mut other = stage.hoard("infer", &options, &[])?;
    let mut stranger = stage.hoard("train", &[], &[])?;
    let mut asker = stage.asks_nvml(Some("infer"), &options, &[])?;
    create(&mut one, 0, 20 * MIB)?;
    create(&mut other, 0, 10 * MIB)?;
    for device in [0, 1] {
        create(&mut stranger, device, 30 * MIB)?;
    }
    create(&mut one, 1, 2 * MIB)?;
    let mut wanted = vec![holds(&one, 20 * MIB), holds(&other, 10 * MIB)];
    wanted.sort_unstable();
    for form in 1..=3 {
        assert_eq!(processes(&mut asker, form, 0)?, wanted, "form {form}");
    }
    // The other GPU has no bound, and is shown as it is.
    let mut everybody = vec![holds(&one, 2 * MIB), holds(&stranger, 30 * MIB)];
    everybody.sort_unstable();
    assert_eq!(processes(&mut asker, 3, 1)?, everybody);
    // Who asks for the number alone is told it as NVML does.
    let refused = asker.ask("none 0")?;
    assert!(!refused.is_ok && refused.text == format!("{INSUFFICIENT_SIZE} 2"), "{refused:?}");
    for form in 1..=3 {
        let refused = asker.ask(&format!("processes {form} 0 1"))?;
        assert!(!refused.is_ok && refused.text == format!("{INSUFFICIENT_SIZE} 2"), "{refused:?}");
        assert!(asker.ask(&format!("processes {form} 0 2"))?.is_ok);
    }
    // A driver whose rows of the third form are longer: they are left as they are.
    let old = [("SIMNVML_DRIVER_VERSION", "535.86.10")];
    let mut asks_an_old_one = stage.asks_nvml(Some("infer"), &options, &old)?;
    assert_eq!(processes(&mut asks_an_old_one, 2, 0)?, wanted);
    assert_eq!(processes(&mut asks_an_old_one, 3, 0)?.len(), 3);
    one.kill()?;
    assert_eq!(processes(&mut asker, 3, 0)?, [holds(&other, 10 * MIB)]);
    other.kill()?;
    asker.do_it("none 0")?;
    Ok(())
}

#[test]
fn what_nvml_refuses_is_refused_and_without_a_budget_all_is_as_it_is() -> Outcome {
    let stage = stage()?;
    let mut stranger = stage.hoard("train", &[], &[])?;
    create(&mut stranger, 0, 30 * MIB)?;
    let whole = [CAPACITY + RESERVED, CAPACITY - 30 * MIB, 30 * MIB + RESERVED];
    let inside = || stage.asks_nvml(Some("infer"), &[], &[]);
    for mut asker in [stage.asks_nvml(None, &[], &[])?, inside()?] {
        assert_eq!(memory(&mut asker, 0)?, whole);
        assert_eq!(processes(&mut asker, 3, 0)?, [holds(&stranger, 30 * MIB)]);
    }
    let mut bound = stage.asks_nvml(Some("bound"), &["--budget", "64MiB"], &[])?;
    for line in ["memory2 0 3", "nowhere"] {
        let (said, wanted) = (bound.ask(line)?, inside()?.ask(line)?);
        assert!(!said.is_ok && said == wanted, "{line}: {said:?}, not {wanted:?}");
    }
    Ok(())
}

#[test]
fn one_that_attaches_and_one_that_is_linked_and_forks_are_answered_so_too() -> Outcome {
    let stage = stage()?;
    let mut holder = stage.hoard("infer", &["--budget", "0=64MiB"], &[])?;
    create(&mut holder, 0, 24 * MIB)?;
    let within = [64 * MIB, 40 * MIB, 24 * MIB];
    let library = stage.files().preload.to_string_lossy().into_owned();
    let settings = [("SUBLET_ATTACH", library.as_str()), ("SUBLET_TENANT", "infer")];
    let mut attached = stage.asks_nvml(None, &[], &settings)?;
    assert_eq!(memory(&mut attached, 0)?, within);
    assert_eq!(processes(&mut attached, 3, 0)?, [holds(&holder, 24 * MIB)]);
    let program = stage.run_dir_path().with_file_name("linked");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/nvml_linked.c");
    let nvml = Files::library_dir("simnvml").join("libnvidia-ml.so.1");
    sublet_stage::programs::cc(&source, &program, &[nvml]);
    let mut command = stage.command(&stage.files().sublet);
    command.args(["run", "--join", "--tenant", "infer", "--library", &library, "--"]).arg(&program);
    let output = command.env("LD_LIBRARY_PATH", stage.libraries_with_nvml()).output()?;
    let line = format!("0 {} {} {}\n", within[0], within[1], within[2]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), line.repeat(2), "{output:?}");
    Ok(())
}

#[test]
fn budgets_and_run_directories_that_cannot_be_read_change_no_answer() -> Outcome {
    let stage = stage()?;
    let whole = [CAPACITY + RESERVED, CAPACITY, RESERVED];
    let library = stage.files().preload.to_string_lossy().into_owned();
    let open = stage.run_dir_path().with_file_name("open to all");
    std::fs::create_dir(&open)?;
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777))?;
    let open = open.to_string_lossy().into_owned();
    let preloaded = [("LD_PRELOAD", library.as_str()), ("SUBLET_TENANT", "infer")];
    for wrong in [("SUBLET_BUDGET", "60PB"), ("SUBLET_RUN_DIR", open.as_str())] {
        let both = [&preloaded[..], &[wrong]].concat();
        let mut asker = stage.asks_nvml(None, &[], &both)?;
        assert_eq!(memory(&mut asker, 0)?, whole, "{wrong:?}");
    }
    // One that no process counts in any more, and what is no such file.
    let dir = stage.run_dir_path().join("infer");
    std::fs::create_dir_all(&dir)?;
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
    for left in [vec![0; 1 << 20], vec![0xff; 1 << 20], b"short".to_vec()] {
        std::fs::write(dir.join("budget"), left)?;
        let mut asker = stage.asks_nvml(None, &[], &preloaded)?;
        assert_eq!(memory(&mut asker, 0)?, whole);
    }
    Ok(())
}

#[test]
fn the_command_sees_the_gpu_itself_also_inside_a_tenant() -> Outcome {
    let stage = stage()?;
    let mut stranger = stage.hoard("train", &[], &[])?;
    create(&mut stranger, 0, 30 * MIB)?;
    let mut command = stage.command(&stage.files().sublet);
    let (library, sublet) = (&stage.files().preload, &stage.files().sublet);
    command.args(["run", "--tenant", "infer", "--budget", "64MiB", "--library"]).arg(library);
    command.arg("--").arg(sublet).args(["ps", "--json"]);
    let output = command.env("LD_LIBRARY_PATH", stage.libraries_with_nvml()).output()?;
    assert!(output.status.success(), "{output:?}");
    let shown: Value = serde_json::from_slice(&output.stdout)?;
    let gpu = &shown["gpus"][0];
    assert_eq!(gpu["name"], "Simulated GPU", "{shown}");
    assert_eq!(gpu["total_bytes"], CAPACITY + RESERVED, "{shown}");
    assert_eq!(gpu["used_bytes"], 30 * MIB, "{shown}");
    Ok(())
}

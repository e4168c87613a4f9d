//! One process that uses several devices, paused from outside at any instant.

use sublet_tests::{MIB, Outcome, Rank, Stage};

const PAUSES: usize = 12;

fn stage(devices: usize) -> Outcome<Stage> {
    Stage::new(&vec![64 * MIB; devices])
}

fn work_for(process: &mut Rank, between: impl FnOnce() -> Outcome) -> Outcome {
    process.do_it("run")?;
    between()?;
    process.do_it("stop")?;
    process.do_it("verify").map(drop)
}

#[test]
fn the_program_is_right_without_sublet() -> Outcome {
    let stage = stage(3)?;
    let mut process = stage.process_on_all_devices(None)?;
    for _ in 0..3 {
        work_for(&mut process, || Ok(()))?;
    }
    Ok(())
}

fn survives_pauses(devices: usize) -> Outcome {
    let stage = stage(devices)?;
    let mut process = stage.process_on_all_devices(Some("all"))?;
    for _ in 0..PAUSES {
        work_for(&mut process, || {
            stage.pause("all")?;
            for device in 0..devices {
                let used_bytes = stage.used_bytes(i32::try_from(device)?)?;
                assert_eq!(used_bytes, 0, "of device {device} while paused");
            }
            stage.resume("all")?;
            Ok(())
        })?;
    }
    let status = process.exit()?;
    assert!(status.success(), "{status}");
    Ok(())
}

#[test]
fn two_devices_of_one_process_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses(2)
}

#[test]
fn four_devices_of_one_process_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses(4)
}

#[test]
fn a_device_without_memory_of_its_own_is_waited_for() -> Outcome {
    let stage = stage(2)?;
    let mut process = stage.process_on_all_devices(Some("all"))?;
    for _ in 0..3 {
        process.do_it("guest")?;
        stage.pause("all")?;
        stage.resume("all")?;
        process.do_it("verify")?;
    }
    Ok(())
}

#[test]
fn one_tag_on_several_devices_leaves_and_comes_back() -> Outcome {
    let stage = stage(3)?;
    let mut process = stage.process_on_all_devices(Some("all"))?;
    for tag in ["kept", "filed", "kept"] {
        let tagged = |verb: &str| stage.patiently(&[verb, "all", "--tag", tag]);
        tagged("pause")?;
        for device in 0..2 {
            assert_eq!(stage.used_bytes(device)?, 10 * MIB, "device {device} without '{tag}'");
        }
        tagged("resume")?;
        process.do_it("verify")?;
        work_for(&mut process, || {
            stage.pause("all")?;
            stage.resume("all").map(drop)
        })?;
    }
    Ok(())
}

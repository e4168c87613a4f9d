//! Tenants that take turns on a device that has no room for the contexts of all.

use std::time::Duration;

use sublet_tests::{MIB, Outcome, Rank, Stage, Trouble, until};

const WAIT: Duration = Duration::from_mins(4);
const CONTEXT: (&str, &str) = ("SIMCUDA_CONTEXT_BYTES", "8388608");
const TENANTS: u32 = 10;

fn name(index: u32) -> String {
    format!("t{index}")
}

/// A tenant with a context of 8 MiB that wants a block of 20.
fn starts(stage: &Stage, index: u32, turns: &[&str], settings: &[(&str, &str)]) -> Outcome<Rank> {
    let settings = [settings, &[CONTEXT]].concat();
    let mut rank = stage.turn_taker_with(&name(index), turns, &settings, 0)?;
    rank.say(&format!("allocate 20 {}", seed(index)))?;
    Ok(rank)
}

fn seed(index: u32) -> u32 {
    100 * (index + 1)
}

fn goes_on(rank: &mut Rank) -> Outcome {
    let answer = rank.answer_within(WAIT)?;
    if answer.is_ok { Ok(()) } else { Err(Trouble::new(format!("refused: {}", answer.text))) }
}

fn is_deep(stage: &Stage, tenant: &str) -> Outcome<bool> {
    Ok(stage.states(tenant)? == ["deep"])
}

#[test]
fn ten_tenants_whose_contexts_do_not_fit_together_take_turns_and_keep_their_contents() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    let (mut ranks, mut lines) = (Vec::new(), Vec::new());
    for index in 0..TENANTS {
        let mut rank = starts(&stage, index, &["--turns", "auto,deep"], &[])?;
        goes_on(&mut rank)?;
        ranks.push(rank);
        lines.extend(stage.decisions()?);
    }
    let first = "the contexts of 't0' leave too: it rests; ";
    assert!(lines.iter().any(|line| line.starts_with(first)), "{lines:?}");
    for _ in 0..2 {
        for (index, rank) in (0..).zip(&mut ranks) {
            rank.say(&format!("own {}", seed(index)))?;
            goes_on(rank)?;
        }
    }
    // All want the device simultaneously.
    for (index, rank) in (0..).zip(&mut ranks) {
        rank.say(&format!("own {}", seed(index)))?;
    }
    for rank in &mut ranks {
        goes_on(rank)?;
    }
    let mut deep = 0;
    for index in 0..TENANTS {
        deep += u32::from(is_deep(&stage, &name(index))?);
    }
    assert!(deep >= 4, "eight contexts fill the device, and {deep} are away");
    Ok(())
}

#[test]
fn without_it_the_one_that_does_not_fit_is_refused_with_what_helps() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    let settings = [("SUBLET_TURNS", "auto,wait=10s")];
    let mut ranks = Vec::new();
    let refused = loop {
        let index = u32::try_from(ranks.len())?;
        assert!(index < TENANTS, "all fit");
        let mut rank = starts(&stage, index, &[], &settings)?;
        let answer = rank.answer_within(WAIT)?;
        ranks.push(rank);
        if !answer.is_ok {
            break index;
        }
    };
    let members = stage.members(&name(refused))?;
    let notes = members[0]["notes"].to_string();
    assert!(notes.contains("`sublet pause t0 --deep`") && notes.contains("auto,deep"), "{notes}");
    // It helps.
    stage.patiently(&["pause", "t0", "--deep"])?;
    let rank = &mut ranks[refused as usize];
    rank.say(&format!("allocate 20 {}", seed(refused)))?;
    goes_on(rank)
}

#[test]
fn a_tenant_that_has_rested_for_its_time_leaves_nothing_on_the_device() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    let mut rank = starts(&stage, 0, &[], &[("SUBLET_TURNS", "auto,deep=200ms")])?;
    goes_on(&mut rank)?;
    stage.pause("t0")?;
    until("its contexts have left", WAIT, || Ok(stage.used_bytes(0)? == 0))?;
    assert!(is_deep(&stage, "t0")?);
    // It was paused by name, and so it stays.
    rank.say(&format!("own {}", seed(0)))?;
    assert!(rank.answer_if_within(Duration::from_millis(500))?.is_none());
    stage.resume("t0")?;
    goes_on(&mut rank)
}

/// By all figures the memory of the first fits next to the second, and its contexts take some of that.
#[test]
fn one_whose_memory_does_not_fit_behind_its_contexts_has_others_make_way_for_both() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    let turns = ["--turns", "auto,deep"];
    let mut first = starts(&stage, 0, &turns, &[])?;
    goes_on(&mut first)?;
    stage.patiently(&["pause", "t0", "--deep"])?;
    let mut second = starts(&stage, 1, &turns, &[])?;
    goes_on(&mut second)?;
    second.do_it("more 12 7")?;
    stage.patiently(&["switch", "t0", "--wait=2m"])?;
    first.do_it(&format!("own {}", seed(0)))?;
    assert!(is_deep(&stage, "t1")?, "its contexts made way too");
    second.say("owns 7")?;
    goes_on(&mut second)
}

/// The third needs the contexts of the first to leave, and the driver takes long for that.
#[test]
fn one_that_is_killed_while_another_s_contexts_leave_for_it_leaves_a_way_back() -> Outcome {
    let stage = Stage::new(&[40 * MIB])?;
    let turns = ["--turns", "auto,deep"];
    let mut first = starts(&stage, 0, &turns, &[])?;
    goes_on(&mut first)?;
    let slow = [("SIMCUDA_LATENCY", "cuCheckpointProcessCheckpoint:2000000")];
    let mut second = starts(&stage, 1, &turns, &slow)?;
    second.say("more 6 7")?;
    until("the contexts of the first leave", WAIT, || is_deep(&stage, "t0"))?;
    second.kill()?;
    first.say(&format!("own {}", seed(0)))?;
    goes_on(&mut first)?;
    assert_eq!(stage.states("t0")?, ["active"]);
    Ok(())
}

//! Tenants of one family, by the real command: memory that one lends and another has open, during pauses of both.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use sublet_tests::{
    Boundary, MIB, Outcome, PAUSE, RESUME, Ran, Random, Rank, Stage, Steps, Trouble,
};

const CAPACITIES: [u64; 2] = [256 * MIB; 2];
const RL: [&str; 2] = ["--family", "rl"];
const REFUSED: &str = "CUDA_ERROR_INVALID_VALUE";
/// For what must not wait long for another tenant.
const SOON: [(&str, &str); 1] = [("SUBLET_WAIT", "3s")];
/// For what must get it in the end, on a busy machine too.
const PATIENT: [(&str, &str); 1] = [("SUBLET_WAIT", "4m")];

/// `train`, which has lent its block to nobody, `infer` of its family, and the block's handle.
struct Pair {
    stage: Stage,
    train: Rank,
    infer: Rank,
    handle: String,
}

fn pair() -> Outcome<Pair> {
    pair_with(&[])
}

fn pair_with(settings: &[(&str, &str)]) -> Outcome<Pair> {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = stage.relative("train", &RL, &[])?;
    let infer = stage.relative("infer", &RL, settings)?;
    train.do_it("allocate 7")?;
    let handle = train.do_it("handle")?.text;
    Ok(Pair { stage, train, infer, handle })
}

impl Pair {
    fn open(&mut self) -> Outcome {
        self.infer.do_it(&format!("open {}", self.handle)).map(drop)
    }

    /// Both hold what they should, and are of use to each other.
    fn works(&mut self) -> Outcome {
        self.train.do_it("own 7")?;
        self.infer.do_it(&format!("buckets 3 7 {}", self.handle)).map(drop)
    }
}

/// Refused by the command, which left all as it was, and how it says so.
fn refused(ran: Ran) -> Outcome<Value> {
    let said = ran.exited(1)?.json()?;
    assert_eq!(said["unchanged"], true, "{said:#}");
    Ok(said)
}

fn text(said: &Value) -> String {
    said.to_string()
}

#[test]
fn memory_is_handed_over_by_bucket_and_both_tenants_pause_and_resume() -> Outcome {
    let mut pair = pair()?;
    pair.infer.do_it(&format!("buckets 1000 7 {}", pair.handle))?;
    for tenant in ["train", "infer"] {
        pair.stage.pause(tenant)?;
        pair.stage.resume(tenant)?;
        pair.works()?;
    }
    // What the borrower writes is the lender's, and is saved with it.
    pair.open()?;
    pair.infer.do_it("store 8")?;
    pair.infer.do_it("close")?;
    pair.stage.pause("train")?;
    pair.stage.resume("train")?;
    pair.train.do_it("own 8")?;
    Ok(())
}

#[test]
fn memory_is_handed_over_by_descriptor_and_across_three_tenants() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = stage.relative("train", &RL, &[])?;
    let mut infer = stage.relative("infer", &RL, &[])?;
    let mut score = stage.relative("score", &RL, &[])?;
    train.do_it("create 7")?;
    let descriptor = train.do_it("export")?.text;
    for borrower in [&mut infer, &mut score] {
        borrower.do_it(&format!("import {descriptor}"))?;
        borrower.do_it("look 7")?;
    }
    score.do_it("store 9")?;
    infer.do_it("look 9")?;
    let said = refused(stage.sublet(&["pause", "train", "--timeout", "3s", "--json"])?)?;
    for words in ["'infer'", "'score'", "VMM import", "cuMemUnmap"] {
        assert!(text(&said).contains(words), "{words}: {said:#}");
    }
    infer.do_it("close")?;
    score.do_it("close")?;
    stage.pause("train")?;
    stage.resume("train")?;
    train.do_it("own 9").map(drop)
}

#[test]
fn a_family_named_by_one_side_only_or_two_families_are_refused_by_name() -> Outcome {
    let none: &[&str] = &[];
    for (lender, borrower, reason) in [
        (none, none, "names no family"),
        (&RL[..], none, "names no family"),
        (none, &RL[..], "sublet run --tenant train --family rl"),
        (&["--family", "a"][..], &["--family", "b"][..], "in family 'b'"),
    ] {
        let stage = Stage::new(&CAPACITIES)?;
        let mut train = stage.relative("train", lender, &[])?;
        let mut infer = stage.relative("infer", borrower, &[])?;
        train.do_it("create 7")?;
        let descriptor = train.do_it("export")?.text;
        let answer = infer.ask(&format!("import {descriptor}"))?;
        assert!(!answer.is_ok && answer.text == REFUSED, "{answer:?}");
        train.do_it("allocate 7")?;
        let handle = train.do_it("handle")?.text;
        let answer = infer.ask(&format!("open {handle}"))?;
        assert!(!answer.is_ok && answer.text == REFUSED, "{answer:?}");
        infer.complained(reason)?;
        infer.complained("train")?;
        infer.complained("infer")?;
    }
    Ok(())
}

#[test]
fn a_family_may_be_named_by_the_environment_and_is_listed() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = stage.relative("train", &[], &[("SUBLET_FAMILY", "rl")])?;
    let mut infer = stage.relative("infer", &RL, &[])?;
    train.do_it("allocate 7")?;
    let handle = train.do_it("handle")?.text;
    infer.do_it(&format!("open {handle}"))?;
    let listed = stage.sublet(&["ps"])?.succeeded()?.stdout;
    let lent =
        format!("4 MiB in 1 allocations are open in process {} of tenant infer", infer.pid());
    assert!(listed.contains("FAMILY") && listed.contains(" rl "), "{listed}");
    assert!(listed.contains(&lent), "{listed}");
    let member = &stage.members("train")?[0];
    assert_eq!(member["member"]["family"], "rl");
    assert_eq!(member["lent"][0]["tenant"], "infer");
    let ran = stage.sublet(&["run", "--tenant", "x", "--family", "not/one", "--", "true"])?;
    assert!(ran.stderr.contains("is no family's name"), "{}", ran.stderr);
    Ok(())
}

#[test]
fn a_device_that_the_borrower_does_not_see_is_named() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = stage.relative("train", &RL, &[("CUDA_VISIBLE_DEVICES", "0")])?;
    let mut infer = stage.relative("infer", &RL, &[("CUDA_VISIBLE_DEVICES", "1")])?;
    train.do_it("allocate 7")?;
    let handle = train.do_it("handle")?.text;
    assert!(!infer.ask(&format!("open {handle}"))?.is_ok);
    infer.complained("which this process does not see")?;
    infer.complained("CUDA_VISIBLE_DEVICES")?;
    stage.pause("train").map(drop)
}

#[test]
fn a_pause_names_who_has_memory_open_and_goes_through_once_it_is_closed() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    let began = Instant::now();
    let ran = pair.stage.sublet(&["pause", "train", "--timeout", "3s", "--json"])?;
    let said = refused(ran)?;
    assert!(began.elapsed() >= Duration::from_secs(3), "{:?}", began.elapsed());
    let pid = format!("process {} of tenant 'infer'", pair.infer.pid());
    for words in [&pid, "4194304 bytes", "1 cudaIpc handle(s)", "cudaIpcCloseMemHandle"] {
        assert!(text(&said).contains(words), "{words}: {said:#}");
    }
    assert_eq!(pair.stage.states("train")?, ["active"]);
    pair.infer.do_it("look 7")?;
    pair.train.do_it("own 7")?;
    // It waits, and goes on by itself.
    std::thread::scope(|scope| -> Outcome {
        let pausing = scope.spawn(|| pair.stage.pause("train"));
        pair.infer.do_it("look 7")?;
        pair.infer.do_it("close")?;
        pausing.join().expect("the thread ends").map(drop)
    })?;
    pair.stage.resume("train")?;
    pair.works()
}

#[test]
fn a_pause_may_leave_what_another_tenant_has_open_and_take_the_rest() -> Outcome {
    let mut pair = pair()?;
    pair.train.do_it("spare kv")?;
    pair.open()?;
    let ran = pair.stage.sublet(&["pause", "train", "--leave-lent", "--json"])?;
    let said = ran.exited(3)?.json()?;
    assert_eq!(said["freed_bytes"], 4 * MIB, "{said:#}");
    assert_eq!(said["stayed_bytes"], 4 * MIB, "{said:#}");
    assert!(text(&said).contains("open in a process of another tenant"), "{said:#}");
    assert_eq!(pair.stage.states("train")?, ["paused"]);
    // The borrower works on it meanwhile, and nothing of its memory is lent again.
    pair.infer.do_it("look 7")?;
    pair.infer.do_it("store 8")?;
    let ran = pair.stage.sublet(&["pause", "train", "--deep", "--json"])?;
    let said = ran.exited(3)?.json()?;
    assert!(text(&said).contains("open in another tenant"), "{said:#}");
    pair.stage.resume("train")?;
    pair.train.do_it("own 8")?;
    // It is lent still: a pause that takes all waits for it, as ever.
    refused(pair.stage.sublet(&["pause", "train", "--timeout", "1s", "--json"])?)?;
    pair.stage.sublet(&["pause", "train", "--leave-lent"])?.exited(3)?;
    // What was closed in the pause stays until the resume, and leaves with the next.
    pair.infer.do_it("close")?;
    pair.stage.resume("train")?;
    pair.stage.pause("train")?;
    pair.stage.resume("train")?;
    pair.train.do_it("own 8")?;
    pair.train.do_it("fill 7")?;
    pair.works()
}

#[test]
fn an_open_waits_for_a_paused_tenant_and_is_refused_by_name_in_the_end() -> Outcome {
    let mut pair = pair_with(&SOON)?;
    pair.stage.pause("train")?;
    let answer = pair.infer.ask(&format!("open {}", pair.handle))?;
    assert!(!answer.is_ok && answer.text == REFUSED, "{answer:?}");
    pair.infer.complained("tenant 'train' is paused")?;
    pair.infer.complained("sublet resume train")?;
    pair.stage.resume("train")?;
    pair.works()?;
    // With time to wait, it comes with the resume, also when the borrower is paused meanwhile.
    let mut patient = pair.stage.relative("score", &RL, &PATIENT)?;
    pair.stage.pause("train")?;
    patient.say(&format!("open {}", pair.handle))?;
    assert!(patient.is_silent_for(Duration::from_millis(50)), "opened while paused");
    pair.stage.pause("score")?;
    pair.stage.resume("score")?;
    pair.stage.resume("train")?;
    assert!(patient.answer()?.is_ok);
    patient.do_it("look 7").map(drop)
}

#[test]
fn what_a_paused_tenant_has_borrowed_comes_back_at_its_address() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    pair.stage.pause("infer")?;
    // Nothing is lent then: its lender may leave and come back, and change it meanwhile.
    pair.stage.pause("train")?;
    let said = refused(pair.stage.sublet(&["resume", "infer", "--json"])?)?;
    for words in ["tenant 'train' is paused", "sublet resume train"] {
        assert!(text(&said).contains(words), "{words}: {said:#}");
    }
    assert_eq!(pair.stage.states("infer")?, ["paused"]);
    pair.stage.resume("train")?;
    pair.train.do_it("fill 9")?;
    pair.stage.resume("infer")?;
    pair.infer.do_it("look 9")?;
    pair.infer.do_it("store 7")?;
    pair.infer.do_it("close")?;
    pair.works()
}

#[test]
fn what_its_lender_freed_or_took_with_it_is_lost_to_the_borrower() -> Outcome {
    for dies in [false, true] {
        let mut pair = pair()?;
        pair.open()?;
        if !dies {
            pair.train.do_it("free")?;
        }
        // It lives on in who has it open.
        pair.infer.do_it("look 7")?;
        if dies {
            pair.train.kill()?;
            pair.infer.do_it("look 7")?;
        } else {
            pair.stage.pause("train")?;
            pair.stage.resume("train")?;
        }
        pair.stage.pause("infer")?;
        let said = refused(pair.stage.sublet(&["resume", "infer", "--json"])?)?;
        assert!(text(&said).contains("--without-lost"), "{said:#}");
        assert!(text(&said).contains("of tenant 'train'"), "{said:#}");
        pair.stage.patiently(&["resume", "infer", "--without-lost"])?;
        pair.infer.do_it("close")?;
        pair.infer.do_it("allocate 3")?;
        pair.infer.do_it("own 3")?;
    }
    Ok(())
}

#[test]
fn a_borrower_that_is_killed_holds_nothing() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    pair.infer.kill()?;
    pair.stage.pause("train")?;
    pair.stage.resume("train")?;
    pair.train.do_it("own 7")?;
    // Also while the pause waits for it.
    let mut infer = pair.stage.relative("infer", &RL, &[])?;
    infer.do_it(&format!("open {}", pair.handle))?;
    std::thread::scope(|scope| -> Outcome {
        let pausing = scope.spawn(|| pair.stage.pause("train"));
        infer.kill()?;
        pausing.join().expect("the thread ends").map(drop)
    })
}

/// Looks at the cut that one process is still at do not mix with the question what it has lent.
#[test]
fn tenants_of_several_processes_in_a_family_change_places() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = [stage.relative("train", &RL, &[])?, stage.relative("train", &RL, &[])?];
    let mut infer = [stage.relative("infer", &RL, &[])?, stage.relative("infer", &RL, &[])?];
    for (lender, borrower) in train.iter_mut().zip(&mut infer) {
        lender.do_it("allocate 7")?;
        let handle = lender.do_it("handle")?.text;
        borrower.do_it(&format!("buckets 3 7 {handle}"))?;
        borrower.do_it("allocate 3")?;
    }
    for _ in 0..3 {
        stage.pause("infer")?;
        stage.patiently(&["resume", "infer"])?;
        stage.pause("infer")?;
        stage.patiently(&["swap", "train", "infer"])?;
        stage.patiently(&["swap", "infer", "train"])?;
        stage.resume("infer")?;
    }
    for (lender, borrower) in train.iter_mut().zip(&mut infer) {
        lender.do_it("own 7")?;
        borrower.do_it("own 3")?;
    }
    Ok(())
}

#[test]
fn tenants_of_a_family_change_places_where_nothing_is_open_between_them() -> Outcome {
    let mut pair = pair()?;
    pair.works()?;
    pair.stage.pause("infer")?;
    for _ in 0..3 {
        pair.stage.patiently(&["swap", "train", "infer"])?;
        pair.stage.patiently(&["swap", "infer", "train"])?;
    }
    // What infer has open is train's, which would leave.
    pair.stage.resume("infer")?;
    pair.open()?;
    pair.stage.pause("infer")?;
    let ran = pair.stage.sublet(&["swap", "train", "infer", "--json"])?;
    let said = ran.exited(1)?.json()?;
    assert!(text(&said).contains("are tenant 'train's, which is to be paused"), "{said:#}");
    assert_eq!(pair.stage.states("train")?, ["active"]);
    assert_eq!(pair.stage.states("infer")?, ["paused"]);
    pair.stage.resume("infer")?;
    pair.infer.do_it("look 7")?;
    // And what is open while both could run.
    let mut score = pair.stage.relative("score", &RL, &[])?;
    score.do_it("allocate 1")?;
    pair.stage.pause("score")?;
    let swap = ["swap", "train", "score", "--timeout", "3s", "--json"];
    let said = pair.stage.sublet(&swap)?.exited(1)?.json()?;
    assert!(text(&said).contains("of tenant 'infer' has 4194304 bytes"), "{said:#}");
    assert_eq!(pair.stage.states("train")?, ["active"]);
    pair.infer.do_it("close")?;
    pair.stage.patiently(&["swap", "train", "score"])?;
    Ok(())
}

#[test]
fn a_borrower_hands_on_no_handle_of_what_it_has_open() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    let answer = pair.infer.ask("again")?;
    assert!(!answer.is_ok, "{answer:?}");
    Ok(())
}

/// Some 200 pauses of either side at random instants, while memory is opened and closed all the time.
#[test]
fn buckets_go_through_beside_pauses_of_either_side_at_random_instants() -> Outcome {
    let mut pair = pair_with(&PATIENT)?;
    let mut random = Random::new();
    pair.infer.say(&format!("trade 7 {}", pair.handle))?;
    for turn in 0..150_u32 {
        let (first, second) = match random.below(3) {
            0 => ("train", None),
            1 => ("infer", None),
            _ => ("infer", Some("train")),
        };
        pair.stage.pause(first)?;
        if let Some(second) = second {
            pair.stage.pause(second)?;
            pair.stage.resume(second)?;
        }
        pair.stage.resume(first)?;
        if turn % 10 == 0 {
            pair.train.do_it("own 7")?;
        }
        let pause = Duration::from_millis(random.below(12));
        assert!(pair.infer.is_silent_for(pause), "it stopped: {}", pair.infer.stderr());
    }
    let [buckets] = {
        pair.infer.say("stop")?;
        pair.infer.answer()?.numbers::<1>()?
    };
    if buckets < 100 {
        return Err(Trouble::new(format!("only {buckets} buckets went through")));
    }
    pair.works()
}

/// Both are paused and resumed by commands of their own, at any instant of each other.
#[test]
fn buckets_go_through_while_both_sides_are_paused_at_once() -> Outcome {
    const ROUNDS: usize = 40;
    let mut pair = pair_with(&PATIENT)?;
    pair.infer.say(&format!("trade 7 {}", pair.handle))?;
    let stage = &pair.stage;
    std::thread::scope(|scope| -> Outcome {
        let lender = scope.spawn(|| -> Outcome {
            (0..ROUNDS).try_for_each(|_| {
                stage.pause("train")?;
                stage.resume("train").map(drop)
            })
        });
        let borrower = scope.spawn(|| -> Outcome {
            (0..ROUNDS).try_for_each(|_| {
                stage.pause("infer")?;
                resume_with_its_lender(stage)
            })
        });
        lender.join().expect("the thread ends")?;
        borrower.join().expect("the thread ends")
    })?;
    assert!(pair.infer.is_silent_for(Duration::ZERO), "it stopped: {}", pair.infer.stderr());
    pair.infer.say("stop")?;
    let [buckets] = pair.infer.answer()?.numbers::<1>()?;
    assert!(buckets > 0);
    pair.works()
}

/// What it has open may be its lender's that is paused just then.
fn resume_with_its_lender(stage: &Stage) -> Outcome {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let ran = stage.sublet(&["resume", "infer", "--json"])?;
        if ran.code == Some(0) {
            return Ok(());
        }
        let said = text(&refused(ran)?);
        let is_away =
            said.contains("tenant 'train' is paused") || said.contains("of tenant 'train' is");
        if !is_away || Instant::now() >= deadline {
            return Err(Trouble::new(said));
        }
    }
}

fn steps(stage: &Stage, tenant: &str, words: &[&str]) -> Outcome<Steps> {
    Steps::start(stage, Path::new(env!("CARGO_BIN_EXE_sublet-steps")), tenant, words)
}

/// The borrower has memory open, and dies in each step of its own pause and resume: nothing of it is lent any more.
#[test]
fn a_borrower_that_is_killed_in_any_step_of_its_own_lets_its_lender_leave() -> Outcome {
    let mut pair = pair()?;
    for (action, phases) in [("pause", &PAUSE[..]), ("resume", &RESUME[..])] {
        for boundary in Boundary::of_all(phases) {
            pair.infer = pair.stage.relative("infer", &RL, &[])?;
            pair.open()?;
            if action == "resume" {
                pair.stage.pause("infer")?;
            }
            let mut steps = steps(&pair.stage, "infer", &[action])?;
            steps.until(boundary)?;
            pair.infer.kill()?;
            steps.finish()?;
            pair.stage.pause("train").map_err(|trouble| {
                Trouble::new(format!("killed at {action}, {boundary}: {trouble}"))
            })?;
            pair.stage.resume("train")?;
            pair.train.do_it("own 7")?;
        }
    }
    Ok(())
}

/// The lender dies in each step of its own pause and resume while the borrower asks it for memory: the borrower is refused,
/// and can be paused and resumed.
#[test]
fn a_lender_that_is_killed_in_any_step_of_its_own_leaves_its_borrower_running() -> Outcome {
    let mut pair = pair_with(&[("SUBLET_WAIT", "5s")])?;
    for (action, phases) in [("pause", &PAUSE[..]), ("resume", &RESUME[..])] {
        for boundary in Boundary::of_all(phases) {
            pair.train = pair.stage.relative("train", &RL, &[])?;
            pair.train.do_it("allocate 7")?;
            pair.handle = pair.train.do_it("handle")?.text;
            pair.infer.do_it(&format!("buckets 1 7 {}", pair.handle))?;
            if action == "resume" {
                pair.stage.pause("train")?;
            }
            let mut steps = steps(&pair.stage, "train", &[action])?;
            steps.until(boundary)?;
            let runs = action == "pause" && boundary == Boundary::Started(PAUSE[0]);
            if !runs {
                pair.infer.say(&format!("open {}", pair.handle))?;
            }
            pair.train.kill()?;
            steps.finish()?;
            if !runs && pair.infer.answer()?.is_ok {
                // It came before the death, and is the borrower's alone.
                pair.infer.do_it("look 7")?;
                pair.infer.do_it("close")?;
            }
            pair.stage.pause("infer")?;
            pair.stage.resume("infer")?;
        }
    }
    Ok(())
}

/// The command that pauses the lender is killed while it waits for the borrower, or behind shut gates: all goes on.
#[test]
fn a_command_that_is_killed_while_it_waits_leaves_both_running() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    for step in ["started memory open in other tenants", "done memory open in other tenants"] {
        let mut steps = steps(&pair.stage, "train", &["pause"])?;
        steps.until_line(step)?;
        steps.kill()?;
        pair.train.do_it("own 7")?;
        pair.infer.do_it("look 7")?;
    }
    let mut steps = steps(&pair.stage, "train", &["pause"])?;
    steps.until(Boundary::Done(PAUSE[0]))?;
    steps.kill()?;
    pair.train.do_it("own 7")?;
    pair.infer.do_it("close")?;
    pair.works()?;
    pair.stage.pause("train")?;
    pair.stage.resume("train")?;
    pair.works()
}

#[test]
fn one_that_stands_still_holds_what_it_has_open_until_it_is_killed() -> Outcome {
    let mut pair = pair_with(&SOON)?;
    pair.open()?;
    pair.infer.stop()?;
    let said = refused(pair.stage.sublet(&["pause", "train", "--timeout", "3s", "--json"])?)?;
    assert!(text(&said).contains("of tenant 'infer'"), "{said:#}");
    pair.infer.kill()?;
    pair.stage.pause("train")?;
    pair.stage.resume("train")?;
    // The other way round: a lender that stands still is given up.
    pair.infer = pair.stage.relative("infer", &RL, &SOON)?;
    pair.train.stop()?;
    assert!(!pair.infer.ask(&format!("open {}", pair.handle))?.is_ok);
    pair.train.signal(Signal::SIGCONT)?;
    pair.works()
}

#[test]
fn a_child_of_the_borrower_holds_nothing() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    pair.infer.do_it("fork")?;
    pair.infer.do_it("close")?;
    pair.stage.pause("train").map(drop)
}

#[test]
fn a_pause_by_tag_of_other_memory_goes_beside_what_is_open() -> Outcome {
    let mut pair = pair()?;
    pair.open()?;
    pair.stage.patiently(&["pause", "train", "--library", "nccl"])?;
    pair.infer.do_it("look 7")?;
    pair.stage.sublet(&["resume", "train"])?;
    pair.infer.do_it("close")?;
    pair.works()
}

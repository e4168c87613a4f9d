//! Pauses and resumes as a timeline, in the JSON that `ui.perfetto.dev` and `chrome://tracing` read: a row for each process, with its
//! phases and their steps, and a row for each process on each GPU.
//!
//! A phase begins for all processes when the slowest has ended the phase before. Processes keep the time of each of their phases.
//! Only a coordinator sees the time between phases, and that is not drawn.

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::ExitCode;

use serde_json::{Value, json};
use tenants::coordinator::TenantStats;
use tenants::run_dir::RunDir;
use tenants::wire::{MemberStats, Phase, PhaseReport};

use crate::args::TraceArgs;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::files;
use crate::gpus::Gpus;
use crate::output::Output;
use crate::view::View;

/// The first row of GPUs. Their numbers are those of no process (`PID_MAX_LIMIT` is 2^22).
const GPU_ROWS: u64 = 1 << 23;
/// The row of the whole tenant.
const TENANT_ROW: u64 = GPU_ROWS - 1;

pub(crate) fn trace(
    args: &TraceArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let view = View::gather(run_dir, Some(&args.tenant))?;
    let mut timeline = Timeline::default();
    for tenant in &view.tenants {
        timeline.kept(&tenant.stats);
    }
    if timeline.is_empty() {
        let message = format!(
            "no process of tenant '{}' has been paused or resumed yet, and nothing was written",
            args.tenant
        );
        return Err(Failure::new(message, EXIT_UNCHANGED));
    }
    let gpus = Gpus::look();
    files::replace(&args.output, &timeline.text(&gpus)?)?;
    output.line(format!(
        "wrote the last pause and resume of tenant '{}' to {}: open it at ui.perfetto.dev",
        args.tenant,
        args.output.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Events so far, in microseconds.
#[derive(Debug, Default)]
struct Timeline {
    events: Vec<Value>,
    /// Rows that have a name.
    named: BTreeSet<u64>,
    /// Machine-wide names, in the order of their rows.
    gpus: Vec<String>,
    /// The start of the next change whose own time is not known.
    end_us: u64,
}

impl Timeline {
    fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    fn text(mut self, gpus: &Gpus) -> Result<String, Failure> {
        for (row, uuid) in (GPU_ROWS..).zip(&self.gpus) {
            self.events.push(name_of("process_name", row, 0, &gpus.find(uuid).in_words()));
        }
        let document = json!({ "displayTimeUnit": "ms", "traceEvents": self.events });
        serde_json::to_string(&document).map_err(|error| Failure::of(&error, EXIT_UNCHANGED))
    }

    /// Adds the last pause and the last resume, as the processes of a tenant keep them. The time between them is not known.
    fn kept(&mut self, stats: &TenantStats) {
        for (title, of) in [
            ("last pause", (|member| &member.last_pause) as fn(&MemberStats) -> &Phases),
            ("last resume", |member| &member.last_resume),
        ] {
            let mut order: Vec<Phase> = Vec::new();
            for (phase, _) in stats.members.iter().flat_map(of) {
                if !order.contains(phase) {
                    order.push(*phase);
                }
            }
            let began_us = self.end_us;
            let mut at_us = began_us;
            for phase in order {
                let mut longest_us = 0;
                for member in &stats.members {
                    let report = of(member).iter().find(|(known, _)| *known == phase);
                    let Some((_, report)) = report else { continue };
                    self.process(&stats.tenant, member.member.pid, &member.member.command);
                    self.phase(member.member.pid, phase, report, at_us);
                    longest_us = report.elapsed_us.max(longest_us);
                }
                at_us += longest_us;
            }
            if at_us > began_us {
                self.name(TENANT_ROW, &format!("tenant {}", stats.tenant));
                self.slice(title, TENANT_ROW, 0, began_us..at_us, &json!({}));
                // A gap separates the two in the drawing.
                self.end_us = at_us + (at_us - began_us) / 10;
            }
        }
    }

    /// Adds one phase of one process: its time, its steps, and its GPUs.
    fn phase(&mut self, pid: u32, phase: Phase, report: &PhaseReport, began_us: u64) {
        let args = json!({
            "bytes": report.bytes,
            "driver_calls": report.driver_calls,
            "kept": report.kept,
            "notes": report.notes,
        });
        let label = phase.label();
        let whole = began_us..began_us + report.elapsed_us;
        self.slice(label, u64::from(pid), 0, whole.clone(), &args);
        let mut at_us = began_us;
        for (step, elapsed_us) in &report.steps {
            // Each part is rounded separately, and some overlap. No part is drawn beyond its whole.
            let left_us = whole.end.saturating_sub(at_us);
            let took_us = left_us.min(*elapsed_us);
            self.slice(step, u64::from(pid), 0, at_us..at_us + took_us, &json!({}));
            at_us += took_us;
        }
        for delta in report.devices.iter().filter(|delta| delta.bytes > 0) {
            let row = self.gpu_row(&delta.uuid);
            let thread = format!("process {pid}");
            self.events.push(name_of("thread_name", row, u64::from(pid), &thread));
            let args = json!({ "bytes": delta.bytes, "free_bytes": delta.free_bytes });
            self.slice(label, row, u64::from(pid), whole.clone(), &args);
            self.events.push(json!({
                "ph": "C", "name": "free bytes", "pid": row, "ts": whole.end,
                "args": { "free": delta.free_bytes },
            }));
        }
    }

    fn slice(&mut self, name: &str, row: u64, thread: u64, time: Range<u64>, args: &Value) {
        self.events.push(json!({
            "ph": "X", "name": name, "pid": row, "tid": thread, "ts": time.start, "dur": time.end - time.start, "args": args,
        }));
    }

    fn process(&mut self, tenant: &str, pid: u32, command: &str) {
        self.name(u64::from(pid), format!("{tenant} {pid} {command}").trim());
    }

    fn name(&mut self, row: u64, name: &str) {
        if self.named.insert(row) {
            self.events.push(name_of("process_name", row, 0, name));
        }
    }

    fn gpu_row(&mut self, uuid: &str) -> u64 {
        let index = self.gpus.iter().position(|known| known == uuid).unwrap_or_else(|| {
            self.gpus.push(uuid.to_owned());
            self.gpus.len() - 1
        });
        GPU_ROWS + index as u64
    }
}

type Phases = Vec<(Phase, PhaseReport)>;

fn name_of(kind: &str, row: u64, thread: u64, name: &str) -> Value {
    json!({ "ph": "M", "name": kind, "pid": row, "tid": thread, "args": { "name": name } })
}

#[cfg(test)]
mod tests {
    use tenants::wire::DeviceDelta;
    use vmm_pool::driver::DeviceOrdinal;

    use super::*;
    use crate::gpus::tests::{UUID, h200};
    use crate::view::tests::busy;

    fn events(timeline: Timeline) -> Vec<Value> {
        let text = timeline.text(&Gpus::of(vec![h200()])).unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        document["traceEvents"].as_array().unwrap().clone()
    }

    fn slice(events: &[Value], name: &str, row: u64) -> [u64; 2] {
        let is_it =
            |event: &&Value| event["ph"] == "X" && event["name"] == name && event["pid"] == row;
        let event = events.iter().find(is_it).unwrap_or_else(|| panic!("no {name} in {events:#?}"));
        ["ts", "dur"].map(|field| event[field].as_u64().unwrap())
    }

    #[test]
    fn a_phase_begins_when_the_slowest_process_has_ended_the_one_before() {
        let mut stats = busy().tenants.remove(0).stats;
        let delta = DeviceDelta {
            device: DeviceOrdinal(0),
            uuid: UUID.to_owned(),
            bytes: 1 << 30,
            free_bytes: 70 << 30,
            total_bytes: 140 << 30,
        };
        stats.members[0].last_pause[1].1.devices = vec![delta];
        let mut quick = stats.members[0].clone();
        quick.member.pid = 13;
        quick.last_pause[0].1.elapsed_us = 1000;
        stats.members.push(quick);
        let mut timeline = Timeline::default();
        timeline.kept(&stats);
        let events = events(timeline);
        assert_eq!(slice(&events, "prepare", 13), [0, 1000]);
        // Its one step says more than the phase took.
        assert_eq!(slice(&events, "copy", 13), [0, 1000]);
        assert_eq!(slice(&events, "copy", 12), [0, 125_000]);
        for row in [12, 13, GPU_ROWS] {
            assert_eq!(slice(&events, "release", row), [250_000, 50_000]);
        }
        assert_eq!(slice(&events, "last pause", TENANT_ROW), [0, 300_000]);
        assert_eq!(slice(&events, "last resume", TENANT_ROW)[0], 330_000);
        let free = events.iter().find(|event| event["ph"] == "C").unwrap();
        assert_eq!((&free["ts"], &free["args"]["free"]), (&json!(300_000), &json!(70_u64 << 30)));
        let is_gpu =
            |event: &&Value| event["ph"] == "M" && event["pid"] == GPU_ROWS && event["tid"] == 0;
        let named = events.iter().find(is_gpu).unwrap();
        assert_eq!(named["args"]["name"], "GPU 3 (GPU-5f00be66)");
    }

    #[test]
    fn what_was_never_paused_has_no_timeline() {
        let mut timeline = Timeline::default();
        timeline.kept(&busy().tenants.remove(1).stats);
        assert!(timeline.is_empty());
    }
}

//! `sublet metrics`: tenants and GPUs for Prometheus, once, in a file, or by HTTP ([`serve`]).

pub(crate) mod serve;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tenants::coordinator::GpuBudget;
use tenants::error_text::{plain, plain_by};
use tenants::run_dir::RunDir;
use tenants::wire::{MemberStats, PauseTimes};

use crate::args::MetricsArgs;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::gpus::{Gpu, Gpus, Watched};
use crate::output::{self, Output};
use crate::view::{TenantView, View};
use crate::{all_users, files, ps, signals};

pub(crate) fn metrics(
    args: &MetricsArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let all_users = args.all_users;
    let mut figures = Figures { run_dir: run_dir.clone(), gpus: Watched::default(), all_users };
    if let Some(address) = args.listen {
        return listen(address, figures, output);
    }
    let Some(path) = &args.textfile else {
        output.text_block(&figures.text()?);
        return Ok(ExitCode::SUCCESS);
    };
    let Some(every) = args.every else {
        files::replace(path, &figures.text()?)?;
        return Ok(ExitCode::SUCCESS);
    };
    let interrupt = signals::watch()?;
    // A failure of the first write ends the command; later writes would fail too.
    files::replace(path, &figures.text()?)?;
    loop {
        interrupt.wait(every);
        if interrupt.is_raised() {
            return Ok(ExitCode::SUCCESS);
        }
        if let Err(failure) = figures.text().and_then(|text| files::replace(path, &text)) {
            output::complain(&failure.to_string());
        }
    }
}

/// Serves figures until a signal.
fn listen(
    address: SocketAddr,
    mut figures: Figures,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let interrupt = signals::watch()?;
    let look = move || figures.text().map_err(|failure| plain(&failure.to_string()));
    serve::serve(address, look, &interrupt, |address| {
        if !address.ip().is_loopback() {
            output::complain(&format!(
                "every user who reaches {address} can read the names and the memory of tenants and processes"
            ));
        }
        output.line(format!("serving http://{address}/metrics until Ctrl-C or SIGTERM"));
        std::mem::take(output).finish()
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The sources of the figures, which are read repeatedly.
struct Figures {
    run_dir: RunDir,
    gpus: Watched,
    all_users: bool,
}

impl Figures {
    fn text(&mut self) -> Result<String, Failure> {
        let (gpus, fell_silent) = self.gpus.look(Gpus::try_look);
        if fell_silent {
            output::complain(
                "NVIDIA's management library does not answer: its figures of GPUs are left out from now on",
            );
        }
        let mut view = View::gather_with(&self.run_dir, None, gpus)?;
        if self.all_users {
            all_users::add(&mut view, &self.run_dir)?;
        }
        text_of(&view)
    }
}

/// Returns the text of all figures. Samples of a family are in the order of their labels, so that two scrapes differ only in
/// changed figures.
fn text_of(view: &View) -> Result<String, Failure> {
    let mut text = String::new();
    encode(&mut text, &registry(view)).map_err(|error| Failure::of(&error, EXIT_UNCHANGED))?;
    let mut lines: Vec<_> = text.lines().collect();
    for family in lines.split_mut(|line| line.starts_with('#')) {
        // Samples of a histogram are in order already, by their bounds.
        if family.iter().all(|line| !line.contains("le=\"")) {
            family.sort_unstable();
        }
    }
    // In a label, a backslash is written as two.
    let all = lines.into_iter().map(|line| plain_by("\\\\u", line) + "\n");
    Ok(all.collect())
}

type Labels = Vec<(&'static str, String)>;

/// Returns labels. A tenant of [`all_users`] has its user in a separate label.
fn labels<const N: usize>(pairs: [(&'static str, &str); N]) -> Labels {
    let split = |(name, value): (&'static str, &str)| {
        let user = value.split_once('/').filter(|_| name == "tenant");
        let (user, value) = user.map_or((None, value), |(user, tenant)| (Some(user), tenant));
        let user = user.map(|user| ("user", user.to_owned()));
        user.into_iter().chain([(name, value.to_owned())])
    };
    pairs.into_iter().flat_map(split).collect()
}

/// Registers a family of whole numbers. Values with the same labels are added.
fn gauge(
    registry: &mut Registry,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (Labels, u64)>,
) {
    let family = Family::<Labels, Gauge<u64, AtomicU64>>::default();
    for (labels, value) in samples {
        family.get_or_create(&labels).inc_by(value);
    }
    registry.register(name, help, family);
}

fn on_gpu(view: &View, tenant: &str, uuid: &str) -> Labels {
    labels([("tenant", tenant), ("gpu", &view.gpu_label(uuid)), ("uuid", uuid)])
}

fn with(mut labels: Labels, more: Labels) -> Labels {
    labels.extend(more);
    labels
}

fn registry(view: &View) -> Registry {
    let mut registry = Registry::with_prefix("sublet");
    gpus(view, &mut registry);
    device_bytes(view, &mut registry);
    budgets(view, &mut registry);
    processes(view, &mut registry);
    host_bytes(view, &mut registry);
    left_bytes(view, &mut registry);
    switches(view, &mut registry);
    registry.register_collector(Box::new(pause_seconds(view)));
    registry
}

fn gpus(view: &View, registry: &mut Registry) {
    let found = view.gpus.iter().map(|gpu| {
        let name = gpu.name.as_deref().unwrap_or_default();
        (labels([("gpu", &gpu.label()), ("name", name), ("uuid", &gpu.uuid)]), 1)
    });
    let bytes = |of: fn(&Gpu) -> Option<u64>| {
        let sample = move |gpu: &Gpu| Some((labels([("uuid", &gpu.uuid)]), of(gpu)?));
        view.gpus.iter().filter_map(sample)
    };
    gauge(registry, "gpu", "1 for each GPU: its index, name and machine-wide name", found);
    let help = "Device memory in use by everybody";
    gauge(registry, "gpu_used_bytes", help, bytes(|gpu| gpu.used_bytes));
    gauge(registry, "gpu_total_bytes", "All memory of the device", bytes(|gpu| gpu.total_bytes));
}

fn device_bytes(view: &View, registry: &mut Registry) {
    let devices = || {
        members(view).flat_map(|(tenant, member)| {
            let devices = member.pool.devices.iter();
            devices.map(move |device| (on_gpu(view, tenant, &device.uuid), device))
        })
    };
    let classes = devices().flat_map(|(place, device)| {
        device.classes.iter().flat_map(move |class| {
            let away_bytes = class.own_bytes.saturating_sub(class.resident_bytes);
            let kinds = [
                ("resident", class.resident_bytes),
                ("away", away_bytes),
                ("imported", class.imported_bytes),
            ];
            let (place, contents) = (place.clone(), ps::contents_label(class.contents));
            kinds.map(|(kind, bytes)| {
                let of = [
                    ("library", &*class.library),
                    ("tag", &class.tag),
                    ("contents", contents),
                    ("kind", kind),
                ];
                (with(place.clone(), labels(of)), bytes)
            })
        })
    });
    let help = "Memory of tenants, by GPU, library and tag. kind: resident (own, on the GPU), away (own, given up), imported (of \
                another process, which counts it as its own)";
    gauge(registry, "device_bytes", help, classes);
    let stay = devices().flat_map(|(place, device)| {
        let of = move |reason: &str| with(place.clone(), labels([("reason", reason)]));
        device.pinned.iter().map(move |pinned| (of(&pinned.reason), pinned.bytes))
    });
    let help = "Memory that a pause leaves on the GPU, by reason";
    gauge(registry, "staying_bytes", help, stay);
}

fn budgets(view: &View, registry: &mut Registry) {
    let bytes = |of: fn(&GpuBudget) -> Option<u64>| {
        view.tenants.iter().flat_map(move |TenantView { stats, .. }| {
            let sample =
                move |gpu: &GpuBudget| Some((on_gpu(view, &stats.tenant, &gpu.gpu), of(gpu)?));
            stats.budgets.iter().filter_map(sample)
        })
    };
    let help = "Budget of a tenant on a GPU";
    gauge(registry, "budget_bytes", help, bytes(|gpu| gpu.budget_bytes));
    let help = "Memory that counts against a tenant's budget on a GPU";
    gauge(registry, "budget_held_bytes", help, bytes(|gpu| Some(gpu.held_bytes)));
}

fn processes(view: &View, registry: &mut Registry) {
    let states = members(view).map(|(tenant, member)| {
        let state = ps::state_label(member.member.state).to_lowercase();
        (labels([("tenant", tenant), ("state", &state)]), 1)
    });
    gauge(registry, "processes", "Processes of a tenant, by state", states);
    let each = |of: fn(&TenantView) -> u64| {
        let sample =
            move |tenant: &TenantView| (labels([("tenant", &tenant.stats.tenant)]), of(tenant));
        view.tenants.iter().map(sample)
    };
    let silent = each(|tenant| tenant.stats.failures.len() as u64);
    let help = "Processes of a tenant that did not answer";
    gauge(registry, "silent_processes", help, silent);
    let changing = each(|tenant| u64::from(!tenant.changed_by.is_empty()));
    let help = "1 while a command pauses, resumes or saves the tenant, else 0";
    gauge(registry, "changing", help, changing);
}

fn left_bytes(view: &View, registry: &mut Registry) {
    let left = view.tenants.iter().flat_map(|tenant| {
        tenant.stats.members.iter().flat_map(move |member| {
            let left = tenant.left_by(member.member.pid);
            let known = member.pool.devices.iter().map(|device| (&*device.uuid, 0));
            let held = left.into_iter().flat_map(|left| &left.gpus);
            let held = held.map(|held| (&*held.uuid, held.bytes));
            let all = known.filter(move |_| left.is_some()).chain(held);
            all.map(|(uuid, bytes)| (on_gpu(view, &tenant.stats.tenant, uuid), bytes))
        })
    });
    let help = "Memory of paused processes of a tenant on a GPU, contexts included, from NVML";
    gauge(registry, "left_bytes", help, left);
    let outside = view.outside.iter().flatten().flat_map(|outside| {
        let tenant = outside.strayed_from.as_deref().unwrap_or_default();
        let each = outside.gpus.iter();
        each.map(move |held| {
            (
                with(on_gpu(view, tenant, &held.uuid), labels([("pid", &outside.pid.to_string())])),
                held.bytes,
            )
        })
    });
    let help = "Memory of processes outside Sublet. tenant: the one whose job started the process, which no pause reaches";
    gauge(registry, "outside_bytes", help, outside);
}

fn host_bytes(view: &View, registry: &mut Registry) {
    let host = members(view).flat_map(|(tenant, member)| {
        let kinds = [
            ("held", member.pool.host_arena_bytes),
            ("wanted", member.host.wanted_bytes),
            ("file", member.pool.file_bytes),
            ("driver", member.pool.host_numa_bytes),
        ];
        kinds.map(|(kind, bytes)| (labels([("tenant", tenant), ("kind", kind)]), bytes))
    });
    let help = "Host memory and disk of a tenant. kind: held (for saved contents), wanted (by the next pause, all of it), file (contents on \
                disk), driver (the driver's own, which is never paused)";
    gauge(registry, "host_bytes", help, host);
}

fn switches(view: &View, registry: &mut Registry) {
    let [pauses, resumes] = [("pauses", "Pauses"), ("resumes", "Resumes")].map(|(name, what)| {
        let family = Family::<Labels, Counter>::default();
        registry.register(name, format!("{what} that a process has completed"), family.clone());
        family
    });
    let seconds = Family::<Labels, Gauge<f64, AtomicU64>>::default();
    let help = "Time of the slowest process in each phase of the tenant's last pause and resume";
    registry.register("last_phase_seconds", help, seconds.clone());
    for (tenant, member) in members(view) {
        let by_pid = labels([("tenant", tenant), ("pid", &member.member.pid.to_string())]);
        pauses.get_or_create(&by_pid).inc_by(member.pauses);
        resumes.get_or_create(&by_pid).inc_by(member.resumes);
        for (change, phases) in [("pause", &member.last_pause), ("resume", &member.last_resume)] {
            for (phase, report) in phases {
                let phase = phase.label().replace(' ', "_");
                let of = labels([("tenant", tenant), ("change", change), ("phase", &phase)]);
                let longest = seconds.get_or_create(&of);
                let elapsed = Duration::from_micros(report.elapsed_us).as_secs_f64();
                longest.set(elapsed.max(longest.get()));
            }
        }
    }
}

/// The durations of pauses, by tenant.
#[derive(Debug)]
struct PauseSeconds(BTreeMap<String, PauseTimes>);

impl Collector for PauseSeconds {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Time of pauses, by process";
        let mut metric = encoder.encode_descriptor(
            "pause",
            help,
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        let seconds = |us| Duration::from_micros(us).as_secs_f64();
        for (tenant, times) in &self.0 {
            let bounds = PauseTimes::BOUNDS_US.map(seconds).into_iter().chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(times.counts).collect();
            let labels = labels([("tenant", tenant)]);
            let mut metric = metric.encode_family(&labels)?;
            let count = times.counts.iter().sum();
            let none = None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>;
            metric.encode_histogram(seconds(times.sum_us), count, &buckets, none)?;
        }
        Ok(())
    }
}

fn pause_seconds(view: &View) -> PauseSeconds {
    let mut all: BTreeMap<String, PauseTimes> = BTreeMap::new();
    for (tenant, member) in members(view) {
        let times = all.entry(tenant.to_owned()).or_default();
        *times = times.plus(member.pause_times);
    }
    PauseSeconds(all)
}

/// Returns all processes that answered, with their tenants' names.
fn members(view: &View) -> impl Iterator<Item = (&str, &MemberStats)> {
    view.tenants.iter().flat_map(|tenant| {
        tenant.stats.members.iter().map(|member| (tenant.stats.tenant.as_str(), member))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::tests::{busy, empty};

    fn lines(view: &View) -> Vec<String> {
        let text = text_of(view).unwrap();
        assert!(text.ends_with("# EOF\n"));
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn bytes_states_and_times_are_there_by_tenant_and_gpu() {
        let lines = lines(&busy());
        let uuid = crate::gpus::tests::UUID;
        for wanted in [
            format!("sublet_gpu{{gpu=\"3\",name=\"NVIDIA H200\",uuid=\"{uuid}\"}} 1"),
            format!("sublet_gpu_used_bytes{{uuid=\"{uuid}\"}} 21474836480"),
            format!(
                "sublet_device_bytes{{tenant=\"train\",gpu=\"3\",uuid=\"{uuid}\",library=\"nccl\",tag=\"nccl\",\
                 contents=\"keep\",kind=\"resident\"}} 536870912"
            ),
            format!(
                "sublet_device_bytes{{tenant=\"infer\",gpu=\"3\",uuid=\"{uuid}\",library=\"torch\",tag=\"kv\",\
                 contents=\"discard\",kind=\"away\"}} 8589934592"
            ),
            "sublet_processes{tenant=\"train\",state=\"active\"} 1".to_owned(),
            "sublet_changing{tenant=\"train\"} 1".to_owned(),
            "sublet_changing{tenant=\"infer\"} 0".to_owned(),
            "sublet_host_bytes{tenant=\"train\",kind=\"held\"} 3221225472".to_owned(),
            "sublet_pauses_total{tenant=\"infer\",pid=\"12\"} 7".to_owned(),
            "sublet_pause_seconds_bucket{le=\"0.3\",tenant=\"infer\"} 6".to_owned(),
            "sublet_pause_seconds_bucket{le=\"1.0\",tenant=\"infer\"} 7".to_owned(),
            "sublet_pause_seconds_count{tenant=\"infer\"} 7".to_owned(),
            "sublet_last_phase_seconds{tenant=\"infer\",change=\"pause\",phase=\"prepare\"} 0.25"
                .to_owned(),
        ] {
            assert!(lines.contains(&wanted), "no {wanted} in {lines:#?}");
        }
    }

    #[test]
    fn samples_are_in_the_same_order_each_time_and_their_names_have_no_blanks() {
        let all = lines(&busy());
        for _ in 0..8 {
            assert_eq!(lines(&busy()), all);
        }
        let phases = all.iter().filter_map(|line| line.split_once("phase=\"")?.1.split('"').next());
        let phases: Vec<_> = phases.collect();
        assert!(phases.contains(&"restore"), "{phases:?}");
        assert!(phases.iter().all(|phase| !phase.contains(' ')), "{phases:?}");
    }

    /// Parsers of the older text format know no other types.
    #[test]
    fn only_counters_gauges_and_histograms_are_used_also_with_no_tenant() {
        for view in [busy(), empty()] {
            for line in lines(&view) {
                if let Some(kind) =
                    line.strip_prefix("# TYPE ").and_then(|rest| rest.split(' ').nth(1))
                {
                    assert!(["gauge", "counter", "histogram"].contains(&kind), "{line}");
                }
            }
        }
    }
}

//! A simulated node with a run directory, and the real command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_stage::Place;
use tenants::run_dir::RunDir;
use tenants::settings::{PREFIX, TEST_PREFIX};
use vmm_pool::driver::{DeviceOrdinal, MemoryInfo};

use crate::{Files, Job, JobOptions, Outcome, Ran, Rank, Trouble, child, until};

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// How long one run of the command may take, on a busy machine too.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(5);
/// The longest time of a change that nobody leads, on a busy machine too.
const SETTLES_WITHIN: Duration = Duration::from_mins(2);
/// Time for each phase of what must succeed, on a busy machine too.
const PATIENT: &[&str] = &["--timeout", "4m"];

/// One node and one run directory, under a directory that goes when this is dropped.
#[derive(Debug)]
pub struct Stage {
    files: Files,
    jobs: AtomicU32,
    place: Place,
}

impl Stage {
    /// A node with one device per capacity.
    pub fn new(capacities_bytes: &[u64]) -> Outcome<Self> {
        let files = Files::from_environment()?;
        Ok(Self { files, jobs: AtomicU32::new(0), place: Place::new(capacities_bytes)? })
    }

    /// What was built.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Where tenants live.
    pub fn run_dir_path(&self) -> PathBuf {
        self.place.run_dir_path()
    }

    /// Where tenants live, for use in this process.
    pub fn run_dir(&self) -> &RunDir {
        self.place.run_dir()
    }

    /// The directory of the node.
    pub fn node_path(&self) -> PathBuf {
        self.place.node_path()
    }

    /// A command that finds the simulated driver, the node and the run directory, and nothing of the
    /// caller's own Sublet.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let is_ours = |name: &OsString| {
            let name = name.to_string_lossy();
            name.starts_with(PREFIX) && !name.starts_with(TEST_PREFIX)
        };
        for name in env::vars_os().map(|(name, _)| name).filter(is_ours) {
            command.env_remove(name);
        }
        command.env_remove("LD_PRELOAD");
        command
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("LD_LIBRARY_PATH", &self.files.simcuda_dir)
            .env("SIMCUDA_NODE", self.node_path())
            .env("SUBLET_RUN_DIR", self.run_dir_path());
        command
    }

    /// Runs the `sublet` command.
    pub fn sublet<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Outcome<Ran> {
        let mut command = self.command(&self.files.sublet);
        child::run(command.args(arguments), Instant::now() + COMMAND_TIMEOUT)
    }

    /// Runs the `sublet` command with a variable of its environment set.
    pub fn sublet_told(&self, name: &str, value: &str, arguments: &[&str]) -> Outcome<Ran> {
        let mut command = self.command(&self.files.sublet);
        child::run(command.env(name, value).args(arguments), Instant::now() + COMMAND_TIMEOUT)
    }

    /// Runs the `sublet` command, with room for so many open files until it asks for more.
    pub fn sublet_with_files(&self, files: u32, arguments: &[&str]) -> Outcome<Ran> {
        let mut command = self.command(Path::new("sh"));
        let script = format!("ulimit -Sn {files} && exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(&self.files.sublet);
        child::run(command.args(arguments), Instant::now() + COMMAND_TIMEOUT)
    }

    /// Starts a job and waits until every rank has its memory.
    pub fn job(&self, options: &JobOptions) -> Outcome<Job> {
        Job::start(self, options, &self.job_dir()?)
    }

    /// As [`Stage::job`], and the ranks open each other's memory and do a step.
    pub fn connected_job(&self, options: &JobOptions) -> Outcome<Job> {
        let mut job = self.job(options)?;
        job.connect()?;
        job.works()?;
        Ok(job)
    }

    /// A node with tenant `train` on it, of so many ranks that are connected.
    pub fn with_train(capacities_bytes: &[u64], ranks: usize) -> Outcome<(Self, Job)> {
        let stage = Self::new(capacities_bytes)?;
        let job = stage.connected_job(&JobOptions::new("train", ranks))?;
        Ok((stage, job))
    }

    /// A process that says that it is there.
    fn started(command: &mut Command) -> Outcome<Rank> {
        let mut process = Rank::start(0, command)?;
        process.answer()?;
        Ok(process)
    }

    /// A program in a tenant, by `sublet run` with these additional words.
    fn run(&self, tenant: &str, words: &[&str], program: &Path) -> Command {
        let mut command = self.command(&self.files.sublet);
        command.args(["run", "--join", "--tenant", tenant]).args(words).arg("--library");
        command.arg(&self.files.preload).arg("--").arg(program);
        command.env("SUBLET_FILE_DIR", self.place.path());
        command
    }

    /// A program on this node, under the preload object when a tenant is named.
    fn program(&self, tenant: Option<&str>, program: &Path) -> Command {
        tenant.map_or_else(|| self.command(program), |tenant| self.run(tenant, &[], program))
    }

    /// Starts `programs/devices.c`, one process that uses all devices of the node, and waits until it has its
    /// memory. Under the preload object when a tenant is named.
    pub fn process_on_all_devices(&self, tenant: Option<&str>) -> Outcome<Rank> {
        Self::started(&mut self.program(tenant, &Files::program("devices")))
    }

    /// Starts `programs/hoard.c` in tenant `tenant`, with further options of `sublet run` and its environment.
    pub fn hoard(
        &self,
        tenant: &str,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Outcome<Rank> {
        let mut command = self.run(tenant, options, &Files::program("hoard"));
        Self::started(command.envs(environment.iter().copied()))
    }

    /// Where the loader finds the simulated driver, and the simulated management library next to it.
    pub fn libraries_with_nvml(&self) -> String {
        format!("{}:{}", self.files.simcuda_dir.display(), Files::library_dir("simnvml").display())
    }

    /// Starts `programs/nvml.py`, which asks NVML and never uses CUDA; in a tenant where one is named, with further options of
    /// `sublet run` and its environment.
    pub fn asks_nvml(
        &self,
        tenant: Option<&str>,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Outcome<Rank> {
        let python = Path::new("python3");
        let mut command =
            tenant.map_or_else(|| self.command(python), |tenant| self.run(tenant, options, python));
        command.arg(Files::script("nvml.py")).env("LD_LIBRARY_PATH", self.libraries_with_nvml());
        command.env("PYTHONDONTWRITEBYTECODE", "1").envs(environment.iter().copied());
        Self::started(&mut command)
    }

    /// Starts `programs/handmade.c` on as many devices of the node, `mode` as it says, and waits until its ranks have
    /// opened each other's memory. Under the preload object when a tenant is named.
    pub fn handmade(&self, tenant: Option<&str>, ranks: usize, mode: &str) -> Outcome<Vec<Rank>> {
        let dir = self.job_dir()?;
        let start = |rank: usize| {
            let mut command = self.program(tenant, &Files::program("handmade"));
            command.arg(rank.to_string()).arg(ranks.to_string()).arg(&dir).arg(mode);
            Rank::start(rank, &mut command)
        };
        let mut all = (0..ranks).map(start).collect::<Outcome<Vec<_>>>()?;
        for rank in &mut all {
            rank.answer()?;
        }
        for rank in &mut all {
            rank.do_it("connect")?;
        }
        Ok(all)
    }

    /// Starts `programs/wander.c` in a tenant, for so many steps, and waits until it has memory.
    pub fn wanderer(&self, tenant: &str, seed: u64, steps: u32) -> Outcome<Rank> {
        let mut command = self.program(Some(tenant), &Files::program("wander"));
        Self::started(command.arg(seed.to_string()).arg(steps.to_string()))
    }

    /// Starts `programs/turns.c` on a device, in a tenant, by `sublet run` with these additional words, and waits until it has joined.
    pub fn turn_taker(&self, tenant: &str, words: &[&str], device: u32) -> Outcome<Rank> {
        self.turn_taker_with(tenant, words, &[], device)
    }

    /// As [`Stage::turn_taker`], with `settings`, variables of its environment alone: `sublet run` does not check them.
    pub fn turn_taker_with(
        &self,
        tenant: &str,
        words: &[&str],
        settings: &[(&str, &str)],
        device: u32,
    ) -> Outcome<Rank> {
        let mut command = self.run(tenant, words, Path::new("env"));
        command.args(settings.iter().map(|(name, value)| format!("{name}={value}")));
        Self::started(command.arg(Files::program("turns")).arg(device.to_string()))
    }

    /// Starts `programs/kept.c`, in a tenant where one is named, with `settings` in its environment, and waits until it has a context.
    pub fn keeper(&self, tenant: Option<&str>, settings: &[(&str, &str)]) -> Outcome<Rank> {
        let mut command = self.program(tenant, &Files::program("kept"));
        Self::started(command.envs(settings.iter().copied()))
    }

    /// Starts `programs/family.c` in a tenant, by `sublet run` with these additional words, and waits until it has joined.
    /// `settings` are variables of its environment.
    pub fn relative(
        &self,
        tenant: &str,
        words: &[&str],
        settings: &[(&str, &str)],
    ) -> Outcome<Rank> {
        let mut command = self.run(tenant, words, &Files::program("family"));
        Self::started(command.envs(settings.iter().copied()))
    }

    /// Starts a program of the GPU lane, `gpu-tests/programs`, on this node, over the simulated NCCL. Its
    /// values go to the directory that comes with it.
    pub fn lane_program(
        &self,
        tenant: Option<&str>,
        program: &str,
        ranks: usize,
        arguments: &[&str],
    ) -> Outcome<(Rank, PathBuf)> {
        self.lane_program_with(tenant, program, ranks, arguments, &[])
    }

    /// As [`Stage::lane_program`], with variables of its environment.
    pub fn lane_program_with(
        &self,
        tenant: Option<&str>,
        program: &str,
        ranks: usize,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Outcome<(Rank, PathBuf)> {
        let dir = self.job_dir()?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let lane = root.join("gpu-lane");
        let mut command = self.program(tenant, Path::new("python3"));
        if ranks > 1 {
            command.arg(lane.join("launch.py")).arg(ranks.to_string());
        }
        command
            .arg(root.join("gpu-tests/programs").join(program))
            .args(arguments)
            .arg("--out")
            .arg(&dir);
        let libraries = format!(
            "{}:{}",
            self.files.simcuda_dir.display(),
            Files::library_dir("simnccl").display()
        );
        command.env("LD_LIBRARY_PATH", libraries).env("SIMNCCL_DIR", &dir);
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
        command.env("PYTHONPATH", lane);
        command.envs(environment.iter().copied());
        Ok((Rank::start(0, &mut command)?, dir))
    }

    /// A new directory for the files of one job.
    pub fn job_dir(&self) -> Outcome<PathBuf> {
        let number = self.jobs.fetch_add(1, Ordering::Relaxed);
        let dir = self.place.path().join(format!("job{number}"));
        std::fs::create_dir(&dir)?;
        Ok(dir)
    }

    /// Runs a `sublet` command that takes `--timeout`, with much time for each phase; it must succeed.
    pub fn patiently(&self, arguments: &[&str]) -> Outcome<Ran> {
        self.sublet(&[arguments, PATIENT].concat())?.succeeded()
    }

    /// As [`Stage::patiently`]; some memory may stay, as when a peer lets it go at that instant.
    pub fn at_least_in_part(&self, arguments: &[&str]) -> Outcome<Ran> {
        let ran = self.sublet(&[arguments, PATIENT].concat())?;
        if ran.code == Some(3) { Ok(ran) } else { ran.succeeded() }
    }

    /// Pauses a tenant by the command, which must succeed. Returns its report.
    pub fn pause(&self, tenant: &str) -> Outcome<Value> {
        self.patiently(&["pause", tenant, "--json"])?.json()
    }

    /// Resumes a tenant by the command, which must succeed. Returns its report.
    pub fn resume(&self, tenant: &str) -> Outcome<Value> {
        self.patiently(&["resume", tenant, "--json"])?.json()
    }

    /// What `sublet stats --json` says of the processes of one tenant.
    pub fn members(&self, tenant: &str) -> Outcome<Vec<Value>> {
        let document = self.sublet(&["stats", tenant, "--json"])?.succeeded()?.json()?;
        let members = document["tenants"][0]["members"].as_array();
        members.cloned().ok_or_else(|| Trouble::new(format!("no members in {document}")))
    }

    /// The states of the processes of one tenant, without repetition.
    pub fn states(&self, tenant: &str) -> Outcome<Vec<String>> {
        let state = |member: &Value| member["member"]["state"].as_str().unwrap_or("?").to_owned();
        let mut states: Vec<String> = self.members(tenant)?.iter().map(state).collect();
        states.sort();
        states.dedup();
        Ok(states)
    }

    /// Waits until all processes of one tenant are in this state. Each look is a run of the command, so this does not spin.
    pub fn states_become(&self, tenant: &str, wanted: &str) -> Outcome {
        let are_so = || Ok(self.states(tenant)? == [wanted]);
        until(&format!("the processes of {tenant} are {wanted}"), SETTLES_WITHIN, are_so)
    }

    /// The states of the processes of one tenant, without repetition, once none of them is on its way.
    pub fn settled(&self, tenant: &str) -> Outcome<Vec<String>> {
        let mut states = Vec::new();
        // Each look is a run of the command, so this does not spin.
        until(&format!("no process of {tenant} is on its way"), SETTLES_WITHIN, || {
            states = self.states(tenant)?;
            Ok(states.iter().all(|state| state == "active" || state == "paused"))
        })?;
        Ok(states)
    }

    /// What the driver says of a device's memory.
    pub fn memory(&self, device: i32) -> Outcome<MemoryInfo> {
        Ok(self.place.memory(DeviceOrdinal(device))?)
    }

    /// What turns have decided, a line each.
    pub fn decisions(&self) -> Outcome<Vec<String>> {
        let shown = self.sublet(&["turns", "--json"])?.succeeded()?.json()?;
        let lines = shown["decisions"].as_array().into_iter().flatten();
        Ok(lines.map(|line| line["text"].as_str().unwrap_or_default().to_owned()).collect())
    }

    /// Bytes of a device that somebody holds.
    pub fn used_bytes(&self, device: i32) -> Outcome<u64> {
        Ok(self.place.used_bytes(DeviceOrdinal(device))?)
    }
}

/// The sum of one figure over all classes of memory of a process, as `sublet stats --json` shows them.
pub fn statistic(member: &Value, name: &str) -> u64 {
    let devices = member["pool"]["devices"].as_array().into_iter().flatten();
    let classes = devices.flat_map(|device| device["memory"].as_array().into_iter().flatten());
    classes.filter_map(|class| class[name].as_u64()).sum()
}

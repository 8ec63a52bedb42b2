//! The `iloader` command: see [`iloader::cli`].

fn main() -> std::process::ExitCode {
    iloader::cli::main()
}

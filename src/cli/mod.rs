//! The command line.

/// Runs the command of this process.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}

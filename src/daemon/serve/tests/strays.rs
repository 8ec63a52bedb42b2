//! Clients that do not keep to the protocol.

use super::*;

fn raw(sandbox: &Sandbox) -> UnixStream {
    let stream = UnixStream::connect(&sandbox.paths.socket).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream
}

/// The error that the daemon sends before it closes the connection.
fn last_words(mut stream: UnixStream) -> Error {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("closed");
    let mut decoder = frame::Decoder::new(frame::REPLY_BYTES_MAX);
    decoder.fill(&bytes);
    let reply = decoder.next_frame().expect("a frame").expect("whole");
    match serde_json::from_slice(&reply).expect("a reply") {
        Reply::Error(error) => error.into(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn garbage_is_answered_and_harms_nobody() {
    let sandbox = Sandbox::ready();
    let mut reader = sandbox.client();
    lease(&mut reader);
    let unknown =
        frame::encode(&serde_json::json!({"protocol": 9, "oldest": 1, "operation": {"fly": {}}}), 999);
    let newer = frame::encode(&serde_json::json!({"protocol": 9, "oldest": 9, "operation": {}}), 999);
    for (bytes, expected) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "'GET '"),
        (vec![0xff; 8], "longer than the limit"),
        (vec![2, 0, 0, 0, b'{', b'!'], "no request"),
        (vec![0, 0, 0, 0], "no request"),
        (unknown.expect("encoded"), "protocol 9"),
        (newer.expect("encoded"), "protocol 9"),
    ] {
        let mut stream = raw(&sandbox);
        stream.write_all(&bytes).expect("written");
        let error = last_words(stream);
        assert!(error.message().contains(expected), "{error}");
    }
    let mut half = raw(&sandbox);
    half.write_all(&[200, 0, 0, 0, b'{']).expect("written");
    drop(half);
    assert_eq!(sandbox.status().leases.len(), 1);
}

#[test]
fn a_request_that_never_gets_whole_is_closed() {
    let sandbox = Sandbox::ready();
    let mut half = raw(&sandbox);
    half.write_all(&[200, 0, 0, 0, b'{']).expect("written");
    let silent = raw(&sandbox);
    assert_eq!(last_words(half).kind(), Kind::TimedOut);
    let mut end = Vec::new();
    (&silent).read_to_end(&mut end).expect("closed");
    assert_eq!(end, b"");
}

#[test]
fn connections_are_counted_and_leases_are_not() {
    let sandbox = Sandbox::ready();
    let mut readers: Vec<Client> = (0..10).map(|_| sandbox.client()).collect();
    for reader in &mut readers {
        lease(reader);
    }
    let mut others: Vec<Client> = (0..CONNECTIONS_MAX).map(|_| sandbox.client()).collect();
    // Each is served, so each was admitted; and being served they may rest a minute.
    for client in &mut others {
        assert_eq!(status_of(client).leases.len(), 10);
    }
    let mut hasty = Client::connect(&sandbox.paths.socket, Duration::from_secs(3)).expect("connected");
    let error = refusal(&mut hasty, Operation::Status {});
    assert!(error.message().contains("256 connections"), "{error}");
    assert!(error.hint_text().is_some());
    // One that has more time is served as soon as there is room.
    let mut patient = sandbox.client();
    let freed = std::thread::spawn(move || drop(others));
    assert_eq!(status_of(&mut patient).leases.len(), 10);
    freed.join().expect("dropped");
    assert_eq!(sandbox.status().leases.len(), 10);
}

#[test]
fn who_does_not_read_holds_nobody_up() {
    let sandbox = Sandbox::with(20_000, |_| {});
    sandbox.finish_loading();
    let mut lazy = sandbox.client();
    for _ in 0..20 {
        lazy.send(Operation::Manifest {}).expect("sent");
    }
    assert_eq!(sandbox.status().files, 20_000);
    // Nothing was lost: each request is answered when the answer before it was read.
    for _ in 0..20 {
        let Reply::Manifest(manifest) = lazy.next(soon()).expect("an answer") else {
            panic!("another answer")
        };
        assert_eq!(manifest.files.len(), 20_000);
    }
}

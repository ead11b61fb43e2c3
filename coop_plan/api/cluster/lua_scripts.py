"""Atomic changes of a job in Redis, as Lua scripts. Times are Redis's own, in ms.

A job is a hash `job:{id}`. Beside it are its request (`:body`), its answer (`:record`) and its
subscribed servers (`:waiting`, with the time at which each subscription ends). The sorted sets
`queued` and `running` have the ids of unfinished jobs. A running job has a lease with a fencing
token, which grows with each lease: calls with an older token change nothing.
"""

from typing import Final

COMMON: Final = """
local P = ARGV[1]
local id, job, state, active
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function get(name) return redis.call('HGET', job, name) or '' end
local function number(name) return tonumber(get(name)) or 0 end

local function is(key, kind)
    local found = redis.call('TYPE', key).ok
    return found == kind or found == 'none'
end

local function forget()
    redis.call('ZREM', P .. 'queued', id)
    redis.call('ZREM', P .. 'running', id)
    redis.call('DEL', job, job .. ':body', job .. ':waiting', job .. ':record')
    state, active = '', false
end

-- Makes a job the current one. One that others have changed is none: its servers submit it again.
local function open(name)
    id, job = name, P .. 'job:' .. name
    local ours = is(job, 'hash') and is(job .. ':waiting', 'zset')
    ours = ours and is(job .. ':body', 'string') and is(job .. ':record', 'string')
    local numbers = {'began', 'version', 'lease', 'published', 'publishes', 'deliveries', 'token'}
    for _, value in ipairs(ours and redis.call('HMGET', job, unpack(numbers)) or {}) do
        ours = ours and (not value or (#value < 16 and string.match(value, '^%d+$')))
    end
    state = ours and get('state') or ''
    active = state == 'queued' or state == 'running'
    if not ours or (active and redis.call('EXISTS', job .. ':body') == 0) then forget() end
end

-- Ids of the jobs in a state by their callers, oldest first, and these callers in that order.
local function jobs_by_caller(wanted)
    local found, callers, current = {}, {}, id
    for _, other in ipairs(redis.call('ZRANGE', P .. wanted, 0, -1)) do
        open(other)
        if state == wanted then
            local caller = get('caller')
            if not found[caller] then
                found[caller] = {}
                table.insert(callers, caller)
            end
            table.insert(found[caller], other)
        else
            redis.call('ZREM', P .. wanted, other)
        end
    end
    open(current)
    return found, callers
end

for name, kind in pairs({queued = 'zset', running = 'zset', served = 'hash'}) do
    if not is(P .. name, kind) then redis.call('DEL', P .. name) end
end
open(ARGV[2])

local function update(...)
    redis.call('HSET', job, ...)
    redis.call('HINCRBY', job, 'version', 1)
    redis.call('PUBLISH', P .. 'news', id)
end

local function finish(how, problem)
    redis.call('ZREM', P .. 'queued', id)
    redis.call('ZREM', P .. 'running', id)
    redis.call('DEL', job .. ':body', job .. ':waiting')
    redis.call('PEXPIRE', job, FINISHED)
    update('state', how, 'problem', problem, 'ended', now, 'message', '')
end

local function queue()
    redis.call('ZREM', P .. 'running', id)
    redis.call('ZADD', P .. 'queued', number('began'), id)
    update('state', 'queued', 'published', now, 'publishes', 1)
end

local function watched()
    if get('wanted') == '1' then return true end
    redis.call('ZREMRANGEBYSCORE', job .. ':waiting', '-inf', now)
    return redis.call('ZCARD', job .. ':waiting') > 0
end

local function subscribe(server)
    redis.call('ZADD', job .. ':waiting', now + SUBSCRIPTION, server)
end
"""

SUBMIT: Final = """
local server, body, max_queued = ARGV[3], ARGV[4], tonumber(ARGV[5])
if not active then
    local mine = #(jobs_by_caller('queued')[ARGV[7]] or {})
    local left = max_queued - redis.call('ZCARD', P .. 'queued')
    if left <= 0 then return 'full' end
    if ARGV[7] ~= '' and mine >= math.floor((left + mine + 1) / 2) then return 'full' end
    if ARGV[6] == '' then return 'absent' end
    local began = get('returns') == '1' and get('began') or now
    redis.call('DEL', job .. ':record', job .. ':waiting')
    redis.call('SET', job .. ':body', body)
    redis.call('HSET', job, 'began', began, 'returns', 0, 'work', ARGV[6], 'caller', ARGV[7],
        'wanted', 0, 'deliveries', 0, 'problem', '', 'ended', '', 'message', '', 'figures', '')
    redis.call('PERSIST', job)
    queue()
    subscribe(server)
    return 'new'
end
subscribe(server)
return 'joined'
"""
"""ARGV: server, body or empty, limit on queued jobs, `JobRequest` or empty, caller.

A caller has at most half of the places that others leave."""

VIEW: Final = """
local resend = 0
if active and ARGV[3] ~= '' then subscribe(ARGV[3]) end
if state == 'running' and number('lease') < now then
    queue()
    resend = 1
elseif state == 'queued' then
    redis.call('ZADD', P .. 'queued', 'NX', number('began'), id)
    local pause = RESEND * 2 ^ math.min(number('publishes') - 1, 6)
    if number('published') + pause < now then
        redis.call('HSET', job, 'published', now)
        redis.call('HINCRBY', job, 'publishes', 1)
        resend = 1
    end
end
return {get('work'), get('state'), get('version'), get('message'), get('figures'), get('problem'),
    tostring(now - (tonumber(get('began')) or now)), resend,
    tostring((tonumber(get('ended')) or now) - (tonumber(get('began')) or now))}
"""
"""ARGV: server whose subscription is renewed, or empty."""

LEASE: Final = """
-- A job whose lease has ended may be leased; else the next one by fairness is: of the caller with
-- the fewest running jobs, then of the one that was served longest ago, then the oldest.
if not (state == 'running' and number('lease') < now) then
    local running = jobs_by_caller('running')
    local queued, callers = jobs_by_caller('queued')
    local best, fewest, longest
    for _, caller in ipairs(callers) do
        local has = #(running[caller] or {})
        local served = tonumber(redis.call('HGET', P .. 'served', caller) or 0) or 0
        if not best or has < fewest or (has == fewest and served < longest) then
            best, fewest, longest = queued[caller][1], has, served
        end
    end
    if not best then return {} end
    open(best)
end
if not watched() then finish('cancelled', 'unwatched') return {} end
if redis.call('HINCRBY', job, 'deliveries', 1) > DELIVERIES then
    finish('failed', 'crashed')
    return {}
end
local token = redis.call('HINCRBY', job, 'token', 1)
redis.call('HSET', P .. 'served', get('caller'), clock[1] * 1000000 + clock[2])
redis.call('ZREM', P .. 'queued', id)
redis.call('ZADD', P .. 'running', now, id)
update('state', 'running', 'lease', now + LEASE)
return {id, token, get('work'), redis.call('GET', job .. ':body')}
"""

RENEW: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if not watched() then finish('cancelled', 'unwatched') return 0 end
redis.call('HSET', job, 'lease', now + LEASE)
if ARGV[4] ~= get('message') or ARGV[5] ~= get('figures') then
    update('message', ARGV[4], 'figures', ARGV[5])
end
return 1
"""
"""ARGV: token, message, figures."""

FINISH: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if ARGV[5] ~= '' then redis.call('SET', job .. ':record', ARGV[5], 'PX', RECORD) end
finish(ARGV[4] == '' and 'done' or 'failed', ARGV[4])
redis.call('HSET', job, 'returns', ARGV[6])
return 1
"""
"""ARGV: token, problem or empty, answer or empty, 1 to keep the place for the next request."""

RELEASE: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
redis.call('HINCRBY', job, 'deliveries', ARGV[4])
redis.call('HSET', job, 'lease', 0)
queue()
return 1
"""
"""ARGV: token, number to add to the deliveries."""

CANCEL: Final = """
if active then finish('cancelled', 'cancelled') return 1 end
return 0
"""

UNSUBSCRIBE: Final = """
redis.call('ZREM', job .. ':waiting', ARGV[3])
if active and not watched() then finish('cancelled', 'unwatched') end
return 1
"""
"""ARGV: server."""

DETACH: Final = """
if active then redis.call('HSET', job, 'wanted', 1) end
return state
"""

FORGET: Final = "forget()"

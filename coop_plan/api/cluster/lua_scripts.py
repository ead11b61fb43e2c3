"""What is done to a job in Redis in one go. Times are Redis's own, in ms.

A job is a hash `job:{id}`; beside it lie its request (`:body`), its answer (`:record`) and who
waits for it (`:waiting`, servers by the time until which they do). `queued` and `running` hold the
ids of jobs that are not over. Whoever works on a job holds a lease and a token; each lease has a
greater token, and what comes with an older one is ignored: its holder was thought dead.
"""

from typing import Final

COMMON: Final = """
local P, id = ARGV[1], ARGV[2]
local job = P .. 'job:' .. id
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function get(name) return redis.call('HGET', job, name) or '' end
local state = get('state')
local active = state == 'queued' or state == 'running'

local function told(...)
    redis.call('HSET', job, ...)
    redis.call('HINCRBY', job, 'version', 1)
    redis.call('PUBLISH', P .. 'news', id)
end

local function over(how, problem)
    redis.call('ZREM', P .. 'queued', id)
    redis.call('ZREM', P .. 'running', id)
    redis.call('DEL', job .. ':body', job .. ':waiting')
    redis.call('PEXPIRE', job, KEPT)
    told('state', how, 'problem', problem, 'ended', now, 'message', '')
end

local function queue()
    redis.call('ZREM', P .. 'running', id)
    redis.call('ZADD', P .. 'queued', get('began'), id)
    told('state', 'queued', 'published', now, 'publishes', 1)
end

local function wanted()
    if get('wanted') == '1' then return true end
    redis.call('ZREMRANGEBYSCORE', job .. ':waiting', '-inf', now)
    return redis.call('ZCARD', job .. ':waiting') > 0
end

local function waits(who)
    redis.call('ZADD', job .. ':waiting', now + INTEREST, who)
end
"""

BEGIN: Final = """
local who, body, most = ARGV[3], ARGV[4], tonumber(ARGV[5])
if not active then
    if redis.call('ZCARD', P .. 'queued') >= most then return 'full' end
    if ARGV[6] == '' then return 'absent' end
    redis.call('DEL', job .. ':record', job .. ':waiting')
    redis.call('SET', job .. ':body', body)
    redis.call('HSET', job, 'began', now, 'work', ARGV[6], 'wanted', 0, 'deliveries', 0,
        'problem', '', 'ended', '', 'message', '', 'figures', '')
    redis.call('PERSIST', job)
    queue()
    waits(who)
    return 'new'
end
waits(who)
return 'joined'
"""
"""ARGV: server, request or nothing, jobs that may wait, what is to be done."""

LOOK: Final = """
local publish = 0
if active and ARGV[3] ~= '' then waits(ARGV[3]) end
if state == 'running' and tonumber(get('lease')) < now then
    queue()
    publish = 1
elseif state == 'queued' then
    local pause = RESEND * 2 ^ math.min(tonumber(get('publishes')) - 1, 6)
    if tonumber(get('published')) + pause < now then
        redis.call('HSET', job, 'published', now)
        redis.call('HINCRBY', job, 'publishes', 1)
        publish = 1
    end
end
return {get('work'), get('state'), get('version'), get('message'), get('figures'), get('problem'),
    tostring(now - (tonumber(get('began')) or now)), publish,
    tostring((tonumber(get('ended')) or now) - (tonumber(get('began')) or now))}
"""
"""ARGV: the server that waits, or nothing."""

CLAIM: Final = """
if not active then return {} end
if state == 'running' and tonumber(get('lease')) >= now then return {} end
if not wanted() then over('cancelled', ARGV[3]) return {} end
if redis.call('HINCRBY', job, 'deliveries', 1) > DELIVERIES then
    over('failed', ARGV[4])
    return {}
end
local token = redis.call('HINCRBY', job, 'token', 1)
redis.call('ZREM', P .. 'queued', id)
redis.call('ZADD', P .. 'running', now, id)
told('state', 'running', 'lease', now + LEASE)
return {token, get('work'), redis.call('GET', job .. ':body')}
"""
"""ARGV: the problems of a job that nobody wants, and of one that ends its workers."""

RENEW: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if not wanted() then over('cancelled', ARGV[6]) return 0 end
redis.call('HSET', job, 'lease', now + LEASE)
if ARGV[4] ~= get('message') or ARGV[5] ~= get('figures') then
    told('message', ARGV[4], 'figures', ARGV[5])
end
return 1
"""
"""ARGV: token, message, figures, the problem of a job that nobody wants."""

FINISH: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if ARGV[5] ~= '' then redis.call('SET', job .. ':record', ARGV[5], 'PX', RECORD) end
over(ARGV[4] == '' and 'done' or 'failed', ARGV[4])
return 1
"""
"""ARGV: token, problem or nothing, answer or nothing."""

HAND_BACK: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
redis.call('HINCRBY', job, 'deliveries', ARGV[4])
redis.call('HSET', job, 'lease', 0)
queue()
return 1
"""
"""ARGV: token, what is added to the deliveries."""

CANCEL: Final = """
if active then over('cancelled', ARGV[3]) return 1 end
return 0
"""
"""ARGV: problem."""

LEAVE: Final = """
redis.call('ZREM', job .. ':waiting', ARGV[3])
if active and not wanted() then over('cancelled', ARGV[4]) end
return 1
"""
"""ARGV: server, problem."""

WANT: Final = """
if active then redis.call('HSET', job, 'wanted', 1) end
return state
"""
